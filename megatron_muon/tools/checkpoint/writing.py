# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint whose values are read from another one, and converted, one at a time."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_muon.mcore.checkpoint_folders import CheckpointError
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint
from megatron_muon.tools.checkpoint.reading import Box, is_tiled, read_chunk


@dataclass
class LazyTensor:
    """Tensor whose chunks are computed while torch writes them.

    Args:
        shape: Shape of the whole tensor.
        dtype: Data type.
        chunks: Box of each chunk, and the function that returns its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[Box, Callable[[], torch.Tensor]]] = field(default_factory=list)

    def add(self, box: Box, source: StoredCheckpoint, key: str, source_box: Box) -> None:
        """Add a chunk with the elements of a box of another tensor, but for axes of one."""
        self.chunks.append((box, functools.partial(read, source, key, source_box)))

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        """Return an item per chunk; torch calls it, as for a DTensor."""
        boxes = [box for box, _ in self.chunks]
        # Torch checks it for several processes alone.
        if not is_tiled(self.shape, boxes):
            raise CheckpointError(
                f"{key}: expected parameters of one shape in all layers and experts, got others. "
                "Nothing was written."
            )
        properties, shape = TensorProperties(self.dtype), torch.Size(self.shape)
        return [
            WriteItem(
                MetadataIndex(key, box[0]),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(*map(torch.Size, box)), properties, shape
                ),
            )
            for box in boxes
        ]


class _Planner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - any object is pickled
        """Return an object, or compute a chunk."""
        value = self.state_dict[index.fqn]
        if not isinstance(value, LazyTensor):
            return value
        assert index.index is not None
        (_, sizes), compute = value.chunks[index.index]
        return compute().to(value.dtype).view(sizes)


def read(checkpoint: StoredCheckpoint, key: str, box: Box) -> torch.Tensor:
    """Read a box of a tensor from all chunks that it overlaps."""
    stored = checkpoint.tensors[key]
    elements = torch.empty(box[1], dtype=stored.properties.dtype)
    chunk = ChunkStorageMetadata(*map(torch.Size, box))
    for item in create_read_items_for_chunk_list(key, stored, [chunk]):
        number = item.storage_index.index
        assert number is not None
        there = read_chunk(checkpoint, key, stored.chunks[number])
        narrow_tensor_by_index(elements, item.dest_offsets, item.lengths).copy_(
            narrow_tensor_by_index(there, item.storage_offsets, item.lengths)
        )
    return elements


def write(values: dict[str, Any], folder: Path) -> None:
    """Write tensors and objects by key into a new folder, a file per object or chunk.

    Memory: the largest parameter, twice, and the largest chunk of the source.
    """
    try:
        with warnings.catch_warnings():
            # Torch says that there is no process group.
            warnings.simplefilter("ignore")
            # Torch keeps all tensors of a file in memory until the file is complete.
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
            planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.save(values, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        # Torch wraps the errors of all ranks: here there is one.
        ((cause, _),) = error.failures.values()
        raise cause from None
