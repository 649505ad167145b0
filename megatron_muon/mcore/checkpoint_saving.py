# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A save that is cut short, at any moment, leaves what was there before."""

import functools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from megatron.core.msc_utils import MultiStorageClientFeature
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix

from megatron_muon.checkpoint.folders import METADATA, TRACKER


def replace_in_one_step(original: type[FileSystemWriter]) -> type[FileSystemWriter]:
    """Derive from ``FileSystemWriter``, which writes over the files of an earlier save.

    Saving an iteration again (after a rewind, or at the end of a run that was already complete)
    would leave a mixture where it is cut short. Here each save gives its files new names, and
    becomes the checkpoint by one rename of its metadata; then the files of earlier ones go.
    """

    class _FileSystem(FileSystem):
        def rm_file(self, path: str | os.PathLike) -> None:
            # Removed before the new one is renamed to it, there would be a moment without.
            if Path(path).name != METADATA:
                super().rm_file(path)

    class ReplacingFileSystemWriter(original):  # type: ignore[misc, valid-type]
        """Write a checkpoint that takes the place of an earlier one in one step."""

        def __init__(self, path: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
            super().__init__(path, *args, **kwargs)
            self.fs = _FileSystem()

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            """Name the files of each rank after this save."""
            if not self.use_collectives:
                return super().prepare_global_plan(plans)
            save = uuid.uuid4().hex[:8]
            return [
                replace(plan, storage_data=_StoragePrefix(f"__{rank}_{save}_"))
                for rank, plan in enumerate(super().prepare_global_plan(plans))
            ]

        def finish(self, metadata: Any, results: list[list[Any]]) -> None:
            """Write the metadata, then remove what it does not name."""
            super().finish(metadata, results)
            if not self.use_collectives:  # each rank has metadata of its own, and names its own
                return
            kept = {result.storage_data.relative_path for written in results for result in written}
            for path in Path(self.path).glob("__*.distcp"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)

    return ReplacingFileSystemWriter


def write_tracker_in_one_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the lookup of ``maybe_msc.open``, by which Megatron writes its tracker.

    Cut short between opening and writing, the tracker would be empty.
    """

    @functools.wraps(original)
    def __getattr__(self: Any, name: str) -> Any:
        found = original(self, name)
        if name != "open" or MultiStorageClientFeature.is_enabled():
            return found
        return functools.partial(_open, found)

    return __getattr__


def _open(original: Callable[..., Any], path: Any, mode: str = "r", **kwargs: Any) -> Any:
    if mode == "w" and os.path.basename(path) == TRACKER:
        return _replaced(Path(path))
    return original(path, mode, **kwargs)


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the place of another when it is closed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
