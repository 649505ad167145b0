# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that leave the earlier checkpoint intact if they are interrupted."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix

from megatron_muon.mcore.checkpoint_folders import METADATA, TRACKER
from megatron_muon.mcore.patching import Patch, replaced
from megatron_muon.mcore.torch_fsdp2 import is_ours


class _FileSystem(FileSystem):
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, but leave metadata to the rename that follows."""
        # Deleting it first would leave a moment without metadata.
        if Path(path).name != METADATA:
            super().rm_file(path)


class ReplacingFileSystemWriter(dcp.FileSystemWriter):
    """Write a checkpoint that replaces an earlier one in one step.

    Every save uses new file names, and becomes the checkpoint when its metadata is renamed. Then
    the files of all other saves are deleted. If a folder has no metadata, an interrupted save has
    left its files, which are deleted before the next save begins.
    """

    _save: str

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.fs = _FileSystem()

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Name the files of all ranks after this save; called by one rank before any writes."""
        self._save = uuid.uuid4().hex[:8]
        if not (Path(self.path) / METADATA).is_file():
            self._remove_others()
        return [
            replace(plan, storage_data=_StoragePrefix(f"__{rank}_{self._save}_"))
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Write the metadata, then remove all other files; called by one rank."""
        super().finish(metadata, results)
        self._remove_others()

    def _remove_others(self) -> None:
        for path in Path(self.path).glob("__*.distcp"):
            if self._save not in path.name:
                path.unlink(missing_ok=True)


# Megatron and Megatron-Bridge look the writer up by this name.
WRITER = Patch(
    "torch.distributed.checkpoint:FileSystemWriter",
    "checkpoints: while one is saved, files of an earlier one are not overwritten",
    lambda original, path, *args, **kwargs: ReplacingFileSystemWriter(path, *args, **kwargs),
    applies_to="call",
)


def replace_in_one_step(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a function that makes a writer, which overwrites the files of an earlier save.

    An iteration may be saved again: after a rewind, or at the end of a run that was already
    complete. An interruption would then leave a mixture of two saves.
    """
    with replaced(WRITER):
        return original(*args, **kwargs)


def save_after_earlier(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``save_checkpoint``: one asynchronous save is in flight at most.

    There is CPU memory for one copy, and upstream's next save may delete what the earlier one is
    writing.

    Communication: if a save is in flight, ``async_save.complete()``.
    """
    from megatron.training.async_utils import maybe_finalize_async_save
    from megatron.training.global_vars import get_args

    if is_ours(get_args()):
        maybe_finalize_async_save(blocking=True)
    return replace_in_one_step(original, *args, **kwargs)


def write_tracker_in_one_step(original: Any, self: Any, name: str) -> Any:
    """Wrap the lookup of ``maybe_msc.open``: Megatron writes its tracker by it.

    An interruption between opening and writing would leave an empty tracker.
    """
    attribute = original(self, name)
    return _open if attribute is open else attribute


def _open(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    """Open a file like ``open``; a written tracker replaces the old one when it is closed."""
    is_tracker = mode == "w" and str(path).endswith(TRACKER)
    return _replaced(Path(path)) if is_tracker else open(path, mode, *args, **options)


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        yield file
    os.replace(temporary, path)
