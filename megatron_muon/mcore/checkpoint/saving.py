# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A save that is interrupted, at any moment, leaves what was there before."""

import functools
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix

from megatron_muon.checkpoint.folders import METADATA, CheckpointError
from megatron_muon.checkpoint.storage import read_checkpoint
from megatron_muon.checkpoint.tracker import open_in_one_step


def replace_in_one_step(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``save_checkpoint``, whose writer overwrites the files of an earlier save.

    An iteration may be saved again: after a rewind, or at the end of a run that was already
    complete. An interruption would then leave a mixture of two saves. Upstream looks the writer up
    in torch by name, so it is replaced there while this function runs.
    """

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        """Save with a writer that replaces in one step."""
        # Not above: a patched source tree imports this module on the way to that one.
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
    """Write a checkpoint that takes the place of an earlier one in one step.

    Each save uses new file names, and becomes the checkpoint by one rename of its metadata. Files
    that the metadata does not name are deleted: leftovers of interrupted saves before this one
    begins, files of the earlier checkpoint after the rename.
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.fs = _FileSystem()

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Name the files of each rank after this save; called by one rank before any writes."""
        self._remove_unused()
        save = uuid.uuid4().hex[:8]
        return [
            replace(plan, storage_data=_StoragePrefix(f"__{rank}_{save}_"))
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Write the metadata, then remove what it does not name; called by one rank."""
        super().finish(metadata, results)
        self._remove_unused()

    def _remove_unused(self) -> None:
        folder = Path(self.path)
        try:
            is_finished = (folder / METADATA).is_file()
            used = read_checkpoint(folder).items_by_file() if is_finished else {}
        except CheckpointError:  # files of a damaged checkpoint may still be of use
            return
        for path in folder.glob("__*.distcp"):
            if path.name not in used:
                path.unlink(missing_ok=True)


def write_tracker_in_one_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the lookup of ``maybe_msc.open``, by which Megatron writes its tracker."""

    @functools.wraps(original)
    def __getattr__(self: Any, name: str) -> Any:
        found = original(self, name)
        return open_in_one_step if found is open else found

    return __getattr__
