# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that leave the earlier checkpoint intact if they are interrupted."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix

from megatron_muon.mcore.checkpoint_folders import METADATA, TRACKER, CheckpointError
from megatron_muon.mcore.checkpoint_reading import read_checkpoint


def replace_in_one_step(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``save_checkpoint``: its writer overwrites the files of an earlier save.

    An iteration may be saved again: after a rewind, or at the end of a run that was already
    complete. An interruption would then leave a mixture of two saves. Upstream looks up the writer
    in torch by name, so it is replaced there while this function runs.
    """

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        """Save through a writer that replaces the folder in one step."""
        # Not at the top: a patched source tree imports this module on the way to that one.
        from megatron.training.global_vars import get_args

        if get_args().ckpt_format != "fsdp_dtensor":
            return original(*args, **kwargs)
        writer = dcp.FileSystemWriter
        dcp.FileSystemWriter = ReplacingFileSystemWriter  # type: ignore[misc]
        try:
            return original(*args, **kwargs)
        finally:
            dcp.FileSystemWriter = writer  # type: ignore[misc]

    return save_checkpoint


class _FileSystem(FileSystem):
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, but leave metadata to the rename that follows."""
        # Deleting it first would leave a moment without metadata.
        if Path(path).name != METADATA:
            super().rm_file(path)


class ReplacingFileSystemWriter(dcp.FileSystemWriter):
    """Write a checkpoint that replaces an earlier one in one step.

    Every save uses new file names, and becomes the checkpoint when its metadata is renamed. Files
    that the metadata does not name are deleted: of interrupted saves before this one begins, of the
    earlier checkpoint after the rename.
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.fs = _FileSystem()

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Name the files of all ranks after this save; called by one rank before any writes."""
        self._remove_unused()
        save = uuid.uuid4().hex[:8]
        return [
            replace(plan, storage_data=_StoragePrefix(f"__{rank}_{save}_"))
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Write the metadata, then remove all other files; called by one rank."""
        super().finish(metadata, results)
        self._remove_unused()

    def _remove_unused(self) -> None:
        folder = Path(self.path)
        try:
            is_finished = (folder / METADATA).is_file()
            used = read_checkpoint(folder).file_sizes() if is_finished else {}
        except CheckpointError:  # files of a damaged checkpoint may still be of use
            return
        for path in folder.glob("__*.distcp"):
            if path.name not in used:
                path.unlink(missing_ok=True)


def write_tracker_in_one_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the lookup of ``maybe_msc.open``: Megatron writes its tracker by it."""

    def __getattr__(self: Any, name: str) -> Any:
        attribute = original(self, name)
        return open_in_one_step if attribute is open else attribute

    return __getattr__


def open_in_one_step(
    path: str | os.PathLike[str] | int, mode: str = "r", *args: object, **options: object
) -> IO[Any] | AbstractContextManager[IO[str]]:
    """Open a file like ``open``; a written tracker replaces the old one when it is closed.

    An interruption between opening and writing would else leave an empty tracker.
    """
    if isinstance(path, str | os.PathLike) and mode == "w" and Path(path).name == TRACKER:
        return _replaced(Path(path))
    return open(path, mode, *args, **options)  # type: ignore[call-overload]


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """Open a file that replaces another one when it is closed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
