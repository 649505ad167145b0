# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint of ``torch.distributed.checkpoint`` from values that are computed on the way.

One process writes it, a file per chunk: ``torch.distributed.checkpoint.save`` keeps all tensors
of a file in memory until the file is complete.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_muon.checkpoint.folders import CheckpointError, expecting
from megatron_muon.checkpoint.reading import Box


class LazyPlanner(dcp.DefaultSavePlanner):
    """Plan a checkpoint whose values are computed when they are written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self._items: list[WriteItem] = []
        self._values: dict[MetadataIndex, Callable[[], Any]] = {}

    def add_chunk(
        self,
        key: str,
        shape: tuple[int, ...],
        box: Box,
        dtype: torch.dtype,
        value: Callable[[], torch.Tensor],
    ) -> None:
        """Add a chunk of a tensor.

        Args:
            key: Key of the tensor.
            shape: Shape of the whole tensor.
            box: Position of the chunk in it, and shape of the chunk.
            dtype: Data type of the tensor.
            value: Returns the elements of the chunk.
        """
        data = TensorWriteData(
            ChunkStorageMetadata(*map(torch.Size, box)), TensorProperties(dtype), torch.Size(shape)
        )
        self._add(
            WriteItem(MetadataIndex(key, box[0]), WriteItemType.SHARD, tensor_data=data), value
        )

    def add_object(self, key: str, value: Any) -> None:  # noqa: ANN401 - any object is pickled
        """Add a value that is pickled."""
        self._add(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), lambda: value)

    def _add(self, item: WriteItem, value: Callable[[], Any]) -> None:
        self._items.append(item)
        self._values[item.index] = value

    def create_local_plan(self) -> SavePlan:
        """Return everything that has been added."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that the chunks of each tensor fill it."""
        with expecting("parameters of one shape in all layers and experts", "the result"):
            return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - any object is pickled
        """Compute a value."""
        return self._values[index]()

    def write(self, folder: Path) -> None:
        """Write everything that has been added into a new folder.

        Memory: the largest chunk, twice.
        """
        try:
            with warnings.catch_warnings():
                # Torch says that there is no process group.
                warnings.simplefilter("ignore")
                writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
                dcp.save({}, storage_writer=writer, planner=self, no_dist=True)
        except CheckpointException as error:
            # Torch wraps the errors of all ranks: here there is one.
            ((cause, _),) = error.failures.values()
            raise cause from None


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path of a folder beside ``target``, renamed to it unless there is an error.

    Raises:
        CheckpointError: ``target`` exists.
        FileExistsError: It has come to exist meanwhile; it is not replaced.
    """
    if os.path.lexists(target):
        raise CheckpointError(
            f"{target}: expected a path to write to, got one that exists. Choose another one."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.converting-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        yield temporary
        for path in Path(folder).rglob("*"):
            _sync(path)
        # A rename alone would replace an empty folder that has appeared meanwhile.
        target.mkdir()
        temporary.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Refuse a folder that is saved anew while it is read.

    Raises:
        CheckpointError: At the end, some file is not the same as at the beginning.
    """
    before = _stamps(folder)
    yield
    if _stamps(folder) != before:
        raise CheckpointError(
            f"{folder}: expected files that do not change while they are read, got new ones: "
            "another process saves there. Wait until it has ended."
        )


def _stamps(folder: Path) -> set[tuple[Path, int, int, int]]:
    """Return inode, size and time of change of every file."""
    files = filter(Path.is_file, folder.iterdir())
    return {(f, s.st_ino, s.st_size, s.st_mtime_ns) for f in files if (s := f.stat())}
