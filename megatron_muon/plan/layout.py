# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Boxes, regions and blocks of matrices: integers only, no communication."""

import functools
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Ranks of the job, ascending.
type Ranks = tuple[int, ...]
# Rows and columns.
type Shape = tuple[int, int]
# Range (start, stop) per dimension of a tensor.
type Box = tuple[tuple[int, int], ...]


def holders_of_segments(
    sizes: Sequence[int], ranks: Sequence[int], axes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the holders of a buffer's segments, in order; the ranks of a segment ascend.

    Megatron-FSDP shards a buffer over the last axis of a mesh first, then each shard over the axis
    before it.

    Args:
        sizes: Sizes of the axes of the mesh.
        ranks: Ranks of the mesh, in its order.
        axes: Axes that shard the buffer; ranks that differ in others are replicas.

    Source: ``DataParallelBuffer`` with ``hsdp_outer_dp_shard`` and ``GlobalLayout.get_local_range``
    of megatron-core 0.19.2.
    """
    by_segment: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, coordinate in zip(ranks, itertools.product(*map(range, sizes)), strict=True):
        by_segment[tuple(coordinate[axis] for axis in reversed(axes))].append(rank)
    return [tuple(sorted(by_segment[segment])) for segment in sorted(by_segment)]


def rows_in_buffer(
    holders: Sequence[Iterable[int]], buffer_size: int, begin: int, num_rows: int, row_size: int
) -> dict[int, tuple[int, int]]:
    """Return the rows ``(start, stop)`` of a tensor in a flat buffer, by rank.

    Args:
        holders: Ranks by segment of the buffer; segments are equal.
        buffer_size: Elements of the buffer.
        begin: Offset of the tensor in the buffer.
        num_rows: Rows of the tensor.
        row_size: Elements of a row.

    Returns:
        The rows by rank. Ranks without rows are left out: only the segments of the tensor are
        visited.

    Raises:
        ValueError: A segment ends inside a row.
    """
    size, end = buffer_size // len(holders), begin + num_rows * row_size
    rows: dict[int, tuple[int, int]] = {}
    for number in range(begin // size, -(-end // size)):
        low, high = max(number * size, begin) - begin, min((number + 1) * size, end) - begin
        # A region is a rectangle of whole rows: a border inside a row cannot be described.
        if low % row_size or high % row_size:
            raise ValueError(
                f"row shards: expected boundaries at whole rows of {row_size} elements, got "
                f"elements [{low}, {high}). Megatron-FSDP shards whole rows; report this model."
            )
        rows |= dict.fromkeys(holders[number], (low // row_size, high // row_size))
    return rows


class Region(NamedTuple):
    """The rectangle of a block that lies in one box.

    Args:
        holders: Ranks of the job that hold it; several with replicated shards.
        block: Index of the block in :attr:`MatrixLayout.blocks`.
        row: First row in the block.
        num_rows: Rows.
        col: First column in the block.
        num_cols: Columns; all columns of the holders' shards.
        local_row: First row in the holders' shards.
    """

    holders: tuple[int, ...]
    block: int
    row: int
    num_rows: int
    col: int
    num_cols: int
    local_row: int


@dataclass(frozen=True)
class MatrixLayout:
    """Regions of a matrix, and its possible owners.

    Args:
        name: Parameter, with index in the batch and outputs of the slice if there are several.
        blocks: Shapes ``(rows, cols)`` of the blocks, whole over tensor parallelism where its mode
            joins them.
        regions: Rectangles that tile the blocks.
        ranks: Ranks of the job that may own the matrix, all holders included, ascending.
        is_transposed: Whether it is stored as (inputs, outputs), so that its result is scaled as
            its transpose.

    Raises:
        ValueError: Regions that do not have as many elements as the blocks.
    """

    name: str
    blocks: tuple[tuple[int, int], ...]
    regions: tuple[Region, ...]
    ranks: tuple[int, ...]
    is_transposed: bool = False

    def __post_init__(self) -> None:
        """Check the regions against the blocks."""
        # A count is enough here: boxes of one tensor do not overlap.
        tiled = sum(region.num_rows * region.num_cols for region in self.regions)
        if tiled != self.num_elements:
            raise ValueError(
                f"{self.name}: expected regions with {self.num_elements} elements in all, as its "
                f"blocks {self.blocks} have, got {tiled}. Pass the boxes of all ranks."
            )

    @property
    def num_elements(self) -> int:
        """Elements of all blocks."""
        return sum(rows * cols for rows, cols in self.blocks)

    @cached_property
    def elements_by_rank(self) -> dict[int, int]:
        """Elements by rank; ranks without elements are left out."""
        return _elements_by_rank(self.regions)


# Shared by matrices of one tiling, such as a parameter of all layers.
@functools.lru_cache(maxsize=256)
def _elements_by_rank(regions: tuple[Region, ...]) -> dict[int, int]:
    elements: dict[int, int] = {}
    for region in regions:
        for rank in region.holders:
            elements[rank] = elements.get(rank, 0) + region.num_rows * region.num_cols
    return elements


class RowRange(NamedTuple):
    """Consecutive rows ``[start, stop)``."""

    start: int
    stop: int


def block_rows(num_rows: int, split_shapes: Sequence[int] | None) -> list[list[RowRange]]:
    """Return the rows of a matrix by block.

    Args:
        num_rows: Rows of the matrix.
        split_shapes: Rows of one query group by block, such as query, key and value; None for a
            matrix with one block.

    Returns:
        The row ranges of every block, one per query group.

    Raises:
        ValueError: The rows are not a whole number of query groups.
    """
    if split_shapes is None:
        return [[RowRange(0, num_rows)]]
    group_rows = sum(split_shapes)
    if num_rows % group_rows:
        raise ValueError(
            f"split: expected a multiple of {group_rows} rows ({list(split_shapes)} a group), got "
            f"{num_rows}. Leave the matrix whole."
        )
    # Fused QKV interleaves: the rows of one query group are query, key, value, then the next group.
    blocks, first = [], 0
    for rows in split_shapes:
        starts = range(first, num_rows, group_rows)
        blocks.append([RowRange(start, start + rows) for start in starts])
        first += rows
    return blocks


class OutputSlice(NamedTuple):
    """Outputs of a parameter that form one matrix.

    Outputs are rows, or columns if the parameter is transposed.

    Args:
        outputs: First output, and the output after the last one.
        blocks: For groups that repeat, the outputs of one group by block, such as query, key and
            value; None for one block.
        stride: Distance of its outputs: 1, or the number of interleaved slices.
    """

    outputs: RowRange
    blocks: tuple[int, ...] | None = None
    stride: int = 1

    def within(self, first: int, last: int) -> tuple[int, slice, int]:
        """Return the intersection with a shard.

        Args:
            first: First output of the shard.
            last: The output after its last one.

        Returns:
            The position in the slice, the outputs in the shard, and their number.
        """
        position = max(0, -(-(first - self.outputs.start) // self.stride))
        start = self.outputs.start + position * self.stride
        stop = max(start, min(last, self.outputs.stop))
        return (
            position,
            slice(start - first, stop - first, self.stride),
            len(range(start, stop, self.stride)),
        )


def tile(
    shape: tuple[int, int], outputs: OutputSlice, boxes: Mapping[int, Box], output_dim: int = 0
) -> tuple[tuple[tuple[int, int], ...], tuple[Region, ...]]:
    """Return the blocks of a slice of a matrix, and the regions that tile them.

    Args:
        shape: Shape of the matrix.
        outputs: Outputs that form the matrix.
        boxes: Box of the matrix by rank; ranks without elements may be missing. Ranks with equal
            boxes are replicas: of hybrid sharding, ZeRO-0 or tensor parallelism.
        output_dim: Dimension of outputs.
    """
    return _tiling(shape, outputs, tuple(boxes.items()), output_dim)


# Equal layers share regions, thousands for a matrix over 16,384 ranks, and results of the planner.
@functools.lru_cache(maxsize=256)
def _tiling(
    shape: tuple[int, int],
    outputs: OutputSlice,
    boxes: tuple[tuple[int, Box], ...],
    output_dim: int,
) -> tuple[tuple[tuple[int, int], ...], tuple[Region, ...]]:
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in sorted(boxes):
        holders[box].append(rank)
    held = []
    for box, members in holders.items():
        position, _, count = outputs.within(*box[output_dim])
        if count and all(start < stop for start, stop in box):
            held.append((position, position + count, box, tuple(members)))
    held.sort()
    # A scan of all boxes per query group would make planning quadratic in ranks.
    ends = list(itertools.accumulate((stop for _, stop, _, _ in held), max))
    num_outputs = len(range(*outputs.outputs, outputs.stride))
    shapes: list[tuple[int, int]] = []
    regions: list[Region] = []
    for block, runs in enumerate(block_rows(num_outputs, outputs.blocks)):
        before = 0
        # Rows of a block are consecutive, though other blocks are between them in the parameter.
        for run in runs:
            for position, stop, box, ranks in held[bisect_right(ends, run.start) :]:
                if position >= run.stop:
                    break
                first, last = max(run.start, position), min(run.stop, stop)
                if first >= last:
                    continue
                ranges = list(box)
                ranges[output_dim] = (before + first - run.start, before + last - run.start)
                (row, last_row), (col, last_col) = ranges
                # Only rows have blocks that repeat: all held columns of a slice are taken.
                local_row = 0 if output_dim else first - position
                regions.append(
                    Region(ranks, block, row, last_row - row, col, last_col - col, local_row)
                )
            before += run.stop - run.start
        size = list(shape)
        size[output_dim] = before
        shapes.append((size[0], size[1]))
    return tuple(shapes), tuple(regions)


@dataclass(frozen=True)
class Splits:
    """Fused matrices that have several blocks.

    Args:
        qkv: Query, key and value of attention (not ``--muon-no-split-qkv``).
        glu: Gate and up of a gated feed-forward layer, experts included (``--muon-split-glu``).
        mla: Multi-latent attention: queries without and with position, keys and values
            (``--muon-split-mla``).
        per_head: One block per head, never joined over tensor-parallel ranks, of the matrices that
            ``qkv`` and ``mla`` split (``--muon-split-qkv-per-head``).

    Raises:
        ValueError: ``per_head`` without ``qkv``.
    """

    qkv: bool = True
    glu: bool = False
    mla: bool = False
    per_head: bool = False

    def __post_init__(self) -> None:
        """Check that a split by head splits query, key and value."""
        if self.per_head and not self.qkv:
            raise ValueError(
                "--muon-split-qkv-per-head: expected query, key and value apart, got "
                "--muon-no-split-qkv. Leave out one of the two."
            )


def halves(num_rows: int) -> tuple[int, int]:
    """Return the rows of gate and up."""
    return num_rows // 2, num_rows // 2


def all_heads(split_shapes: Sequence[int], num_rows: int, head_rows: int = 0) -> tuple[int, ...]:
    """Return the rows of all heads of a matrix, as one group of blocks.

    Args:
        split_shapes: Rows of one group by block, such as query, key and value.
        num_rows: Rows of the matrix: a whole number of groups.
        head_rows: Rows of a head, a divisor of all block rows; 0 if every block is a head.
    """
    heads = [head_rows or rows for rows in split_shapes for _ in range(rows // (head_rows or rows))]
    return tuple(heads) * (num_rows // sum(split_shapes))
