# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint whose values are read from another one, and converted, one at a time."""

import functools
import warnings
from collections.abc import Callable
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
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_muon.mcore.checkpoint_folders import CheckpointError, expecting
from megatron_muon.mcore.checkpoint_reading import Box, StoredCheckpoint, is_tiled


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return (0,) * len(shape), shape


class Conversion(dcp.DefaultSavePlanner):
    """Plan of a checkpoint; values are read and converted while they are written.

    Torch computes a value by ``lookup_object()`` when it writes it, so that one is in memory.

    Args:
        source: Checkpoint to convert.
    """

    def __init__(self, source: StoredCheckpoint) -> None:
        super().__init__(flatten_state_dict=False)
        self.source = source
        # The halves of a gated layer may be in one chunk.
        self._read_chunk = functools.lru_cache(maxsize=1)(source.read_chunk)
        self._items: list[WriteItem] = []
        self._values: dict[MetadataIndex, Callable[[], Any]] = {}

    def copy(
        self,
        source: str,
        target: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        source_box: Box | None = None,
        box: Box | None = None,
    ) -> None:
        """Add a chunk of a tensor, with the elements of a box of the source.

        Args:
            source: Key of a tensor of the source.
            target: Key of the new tensor.
            shape: Shape of the whole new tensor.
            dtype: Data type of the new tensor.
            source_box: Box of the tensor of the source; None for all of it. Its shape may differ
                from the chunk's by axes of one.
            box: Position of the chunk in the new tensor, and shape of the chunk; None for all.
        """
        source_box = source_box or whole_box(self.source.tensors[source].size)
        box = box or whole_box(shape)
        self.add_chunk(
            target, shape, box, dtype, lambda: self._read(source, *source_box).view(box[1])
        )

    def add_chunk(
        self,
        key: str,
        shape: tuple[int, ...],
        box: Box,
        dtype: torch.dtype,
        value: Callable[[], torch.Tensor],
    ) -> None:
        """Add a chunk of a tensor, with the elements that a function returns."""
        data = TensorWriteData(
            ChunkStorageMetadata(*map(torch.Size, box)), TensorProperties(dtype), torch.Size(shape)
        )
        item = WriteItem(MetadataIndex(key, box[0]), WriteItemType.SHARD, tensor_data=data)
        self._add(item, lambda: value().to(dtype))

    def add_object(self, key: str, value: Any) -> None:  # noqa: ANN401 - any object is pickled
        """Add a value that is pickled."""
        self._add(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), lambda: value)

    def _add(self, item: WriteItem, value: Callable[[], Any]) -> None:
        self._items.append(item)
        self._values[item.index] = value

    def _read(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """Read a box of a tensor of the source from all chunks that it overlaps."""
        stored = self.source.tensors[key]
        if any(o + n > m for o, n, m in zip(offsets, sizes, stored.size, strict=True)):
            raise CheckpointError(
                f"{key}: expected the shape of its weight, got {tuple(stored.size)}."
            )
        box = torch.empty(sizes, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            sides = [*zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
            overlap = [(max(o, p), min(o + n, p + m)) for o, n, p, m in sides]
            if all(start < stop for start, stop in overlap):
                here, there = (
                    tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, first, strict=True))
                    for first in (offsets, chunk.offsets)
                )
                box[here] = self._read_chunk(key, chunk.offsets, chunk.sizes)[there]
        return box

    def create_local_plan(self) -> SavePlan:
        """Return all added items."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that chunks fill their tensors: torch does not in one process."""
        with expecting("parameters of one shape in all layers and experts", "the result"):
            plans, metadata = super().create_global_plan(all_plans)
            for key, value in metadata.state_dict_metadata.items():
                if isinstance(value, TensorStorageMetadata):
                    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in value.chunks]
                    if not is_tiled(tuple(value.size), boxes):
                        raise ValueError(f"others for {key}")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - any object is pickled
        """Compute a value."""
        return self._values[index]()

    def write(self, folder: Path) -> None:
        """Write all added items into a new folder, a file per tensor or chunk.

        Memory: the largest parameter, twice, and the largest chunk of the source.
        """
        try:
            with warnings.catch_warnings():
                # Torch says that there is no process group.
                warnings.simplefilter("ignore")
                # Torch keeps all tensors of a file in memory until the file is complete.
                writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
                dcp.save({}, storage_writer=writer, planner=self, no_dist=True)
        except CheckpointException as error:
            # Torch wraps the errors of all ranks: here there is one.
            ((cause, _),) = error.failures.values()
            raise cause from None
