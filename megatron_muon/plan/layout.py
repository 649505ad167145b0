# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Boxes, regions and blocks of matrices: integers only, no communication."""

import functools
import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Ranks of the job; ascending, unless a docstring gives another order.
type Ranks = tuple[int, ...]
# Rows and columns.
type MatrixShape = tuple[int, int]
# Start and stop.
type Range = tuple[int, int]
# Range per dimension of a tensor.
type Box = tuple[Range, ...]


def holders_of_segments(
    sizes: Sequence[int], ranks: Sequence[int], axes: Sequence[int]
) -> list[Ranks]:
    """Return the holders of the segments of a buffer that a mesh shards over some of its axes.

    Megatron-FSDP shards a buffer over the last axis first, then the resulting shards over the axis
    before it. Ranks that differ in other axes are replicas.

    Args:
        sizes: Sizes of the axes of the mesh.
        ranks: Ranks of the mesh, in its order.
        axes: Axes that shard the buffer.

    Source: ``DataParallelBuffer`` with ``hsdp_outer_dp_shard`` and ``GlobalLayout.get_local_range``
    of megatron-core 0.19.2.
    """
    by_segment: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, coordinate in zip(ranks, itertools.product(*map(range, sizes)), strict=True):
        by_segment[tuple(coordinate[axis] for axis in reversed(axes))].append(rank)
    return [tuple(sorted(by_segment[segment])) for segment in sorted(by_segment)]


def rows_in_buffer(
    holders: Sequence[Iterable[int]], buffer_size: int, begin: int, num_rows: int, row_size: int
) -> dict[int, Range]:
    """Return the rows of a tensor in a flat buffer by rank; ranks without rows are left out.

    Args:
        holders: Ranks by segment of the buffer; segments have one size.
        buffer_size: Elements of the buffer.
        begin: First element of the tensor.
        num_rows: Rows of the tensor.
        row_size: Elements of a row.

    Raises:
        ValueError: A segment ends inside a row.
    """
    size, end = buffer_size // len(holders), begin + num_rows * row_size
    rows: dict[int, Range] = {}
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
    """Intersection of a block and a box.

    Args:
        holders: Ranks that hold it; several if the shard is replicated.
        block: Index of the block in ``MatrixLayout.blocks``.
        row: First row in the block.
        num_rows: Rows.
        col: First column in the block.
        num_cols: Columns; all columns of the holders' shards.
        local_row: First row in the holders' shards.
    """

    holders: Ranks
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
        ranks: Ranks that may own the matrix, all holders included.
        is_transposed: Whether it is stored as (inputs, outputs), so that its result is scaled as
            its transpose.

    Raises:
        ValueError: Regions that do not have as many elements as the blocks.
    """

    name: str
    blocks: tuple[MatrixShape, ...]
    regions: tuple[Region, ...]
    ranks: Ranks
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
    elements: Counter[int] = Counter()
    for region in regions:
        for rank in region.holders:
            elements[rank] += region.num_rows * region.num_cols
    return elements


def block_rows(num_rows: int, split_shapes: Sequence[int] | None) -> list[list[range]]:
    """Return the row ranges of every block of a matrix, one per query group.

    Args:
        num_rows: Rows of the matrix.
        split_shapes: Rows of one query group by block, such as query, key and value; None for a
            matrix with one block.

    Raises:
        ValueError: The rows are not a whole number of query groups.
    """
    split_shapes = split_shapes or (num_rows,)
    group_rows = sum(split_shapes)
    if num_rows % group_rows:
        raise ValueError(
            f"split: expected a multiple of {group_rows} rows ({list(split_shapes)} a group), got "
            f"{num_rows}. Leave the matrix whole."
        )
    # Fused QKV interleaves: the rows of one query group are query, key, value, then the next group.
    firsts = itertools.accumulate(split_shapes, initial=0)
    return [
        [range(start, start + rows) for start in range(first, num_rows, group_rows)]
        for first, rows in zip(firsts, split_shapes, strict=False)
    ]


class OutputSlice(NamedTuple):
    """Outputs of a parameter that form one matrix.

    Outputs are rows, or columns if the parameter is transposed.

    Args:
        outputs: The outputs; with a step if slices are interleaved.
        blocks: For groups that repeat, the outputs of one group by block, such as query, key and
            value; None for one block.
    """

    outputs: range
    blocks: tuple[int, ...] | None = None

    def within(self, first: int, last: int) -> tuple[int, slice, int]:
        """Intersect the slice with a shard of outputs ``[first, last)``.

        Returns:
            The position of the intersection in the slice, its outputs in the shard, and their
            number.
        """
        position = max(0, -(-(first - self.outputs.start) // self.outputs.step))
        start = self.outputs.start + position * self.outputs.step
        stop = max(start, min(last, self.outputs.stop))
        return (
            position,
            slice(start - first, stop - first, self.outputs.step),
            len(range(start, stop, self.outputs.step)),
        )


type Tiling = tuple[tuple[MatrixShape, ...], tuple[Region, ...]]


def tile(
    shape: MatrixShape, outputs: OutputSlice, boxes: Mapping[int, Box], output_dim: int = 0
) -> Tiling:
    """Return the blocks of a slice of a matrix, and the regions that tile them.

    Ranks without elements may be missing in ``boxes``. Ranks with equal boxes are replicas, as in
    hybrid sharding, ZeRO-0 or tensor parallelism. Outputs are in dimension ``output_dim``.
    """
    return _tiling(shape, outputs, tuple(boxes.items()), output_dim)


# Equal layers share regions, thousands for a matrix over 16,384 ranks, and results of the planner.
@functools.lru_cache(maxsize=256)
def _tiling(
    shape: MatrixShape,
    outputs: OutputSlice,
    boxes: tuple[tuple[int, Box], ...],
    output_dim: int,
) -> Tiling:
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in sorted(boxes):
        holders[box].append(rank)
    shards = []
    for box, ranks in holders.items():
        position, _, count = outputs.within(*box[output_dim])
        if count and all(start < stop for start, stop in box):
            shards.append((position, position + count, box, tuple(ranks)))
    shards.sort()
    # A scan of all boxes per query group would make planning quadratic in ranks.
    ends = list(itertools.accumulate((stop for _, stop, _, _ in shards), max))
    num_outputs = len(outputs.outputs)
    blocks: list[MatrixShape] = []
    regions: list[Region] = []
    for block, runs in enumerate(block_rows(num_outputs, outputs.blocks)):
        before = 0
        # Rows of a block are consecutive, though other blocks are between them in the parameter.
        for run in runs:
            for position, stop, box, members in shards[bisect_right(ends, run.start) :]:
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
                    Region(members, block, row, last_row - row, col, last_col - col, local_row)
                )
            before += run.stop - run.start
        blocks.append((shape[0], before) if output_dim else (before, shape[1]))
    return tuple(blocks), tuple(regions)


@dataclass(frozen=True)
class Splits:
    """Fused parameters that are split into blocks.

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
