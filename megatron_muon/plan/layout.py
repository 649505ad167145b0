# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Row ranges of a matrix over the ranks of a group: integers only, no tensors, no communication.

Vocabulary:

==============  ================================================================================
matrix          one 2-D parameter as tensor parallelism leaves it on this rank, ``(rows, cols)``
row shard       the contiguous rows ``[start, stop)`` of a matrix that one rank holds, maybe none
layout          the row shards of one matrix, by rank of the group they are cut over
block           rows of a matrix that Newton-Schulz sees as one: query, key, value, or all of it
fragment        the rectangle of a block that lies in one rank's shard
holder          a rank that has a fragment; several where shards are replicated
==============  ================================================================================
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class RowLayout:
    """Say which rank of a group holds which rows of a matrix.

    Args:
        num_rows: Rows of the whole matrix.
        num_cols: Columns of the whole matrix.
        shards: Row range ``(start, stop)`` of every rank, indexed by its rank in the group. A rank
            that holds nothing has ``start == stop``.

    Raises:
        ValueError: The ranges leave rows out, overlap, or run past the matrix.
    """

    num_rows: int
    num_cols: int
    shards: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Check that the shards cover every row exactly once."""
        covered = 0
        for start, stop in sorted(shard for shard in self.shards if shard[0] != shard[1]):
            if start != covered or stop < start:
                raise ValueError(
                    f"RowLayout: expected row shards that cover {self.num_rows} rows once, got a "
                    f"shard [{start}, {stop}) after row {covered}. Check the order of the ranks."
                )
            covered = stop
        if covered != self.num_rows:
            raise ValueError(
                f"RowLayout: expected row shards that cover {self.num_rows} rows, got {covered} "
                "rows. Check that every rank of the group is listed."
            )

    @property
    def max_shard_rows(self) -> int:
        """Rows of the largest shard."""
        return max(stop - start for start, stop in self.shards)

    def shard_rows(self, rank: int) -> int:
        """Count the rows that ``rank`` of the group holds."""
        start, stop = self.shards[rank]
        return stop - start

    @cached_property
    def _by_row(self) -> tuple[list[int], list[int]]:
        """List the ranks that hold rows in the order of rows, and where their rows end."""
        ranks = sorted(
            (rank for rank, (start, stop) in enumerate(self.shards) if start < stop),
            key=lambda rank: self.shards[rank],
        )
        return ranks, [self.shards[rank][1] for rank in ranks]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield which rank holds which rows of a range: ``(rank, first, last)``, ascending."""
        ranks, ends = self._by_row
        for position in range(bisect_right(ends, start), len(ranks)):
            shard_start, shard_stop = self.shards[ranks[position]]
            if shard_start >= stop:
                return
            yield ranks[position], max(start, shard_start), min(stop, shard_stop)


def shards_from_flat_ranges(
    num_rows: int, num_cols: int, item_start: int, flat_ranges: list[tuple[int, int]]
) -> RowLayout:
    """Cut a matrix by ranges of a flat buffer it lies in.

    Args:
        num_rows: Rows of the matrix.
        num_cols: Columns of the matrix.
        item_start: Offset of the matrix's first element in the buffer, in elements.
        flat_ranges: Elements ``[start, stop)`` of the buffer that each rank holds.

    Returns:
        The layout, one row shard for each entry of ``flat_ranges``.

    Raises:
        ValueError: A boundary lies inside a row.
    """
    shards = []
    num_elements = num_rows * num_cols
    for flat_start, flat_stop in flat_ranges:
        start = min(max(flat_start - item_start, 0), num_elements)
        stop = min(max(flat_stop - item_start, 0), num_elements)
        if start % num_cols or stop % num_cols:
            raise ValueError(
                f"row shards: expected boundaries at whole rows of {num_cols} elements, got "
                f"elements [{start}, {stop}). Megatron-FSDP cuts whole rows; report this model."
            )
        shards.append((start // num_cols, stop // num_cols))
    return RowLayout(num_rows, num_cols, tuple(shards))


class Fragment(NamedTuple):
    """A rectangle of a block, as it lies in the shards of the ranks that hold it.

    Args:
        holders: Ranks of the job that hold it, more than one where shards are replicated.
        block: Index of the block in :attr:`MatrixLayout.blocks`.
        row: First row in the block.
        num_rows: Rows.
        col: First column in the block.
        num_cols: Columns.
        local_row: First row in the holders' shards, whose columns it fills.
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
    """Say where every part of a matrix lies, and who may orthogonalize it.

    Args:
        fqn: Fully qualified name of the parameter.
        blocks: Shape ``(rows, cols)`` of each block, whole over tensor parallelism where its mode
            asks for that.
        fragments: Rectangles that tile the blocks.
        ranks: Ranks of the job that may own the matrix, ascending; every holder is one of them.
    """

    fqn: str
    blocks: tuple[tuple[int, int], ...]
    fragments: tuple[Fragment, ...]
    ranks: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of all blocks."""
        return sum(rows * cols for rows, cols in self.blocks)

    @cached_property
    def elements_by_rank(self) -> dict[int, int]:
        """Count the elements that each rank holds; ranks that hold none are left out."""
        elements: dict[int, int] = {}
        for fragment in self.fragments:
            for rank in fragment.holders:
                held = elements.get(rank, 0)
                elements[rank] = held + fragment.num_rows * fragment.num_cols
        return elements


def qkv_blocks(
    num_rows: int, split_shapes: Sequence[int] | None
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Cut the rows of a matrix into independent blocks.

    Args:
        num_rows: Rows of the matrix.
        split_shapes: Rows of one query group that go to each block, such as query, key and value;
            None for a matrix that is one block.

    Returns:
        For each block the row ranges ``(start, stop)`` it takes, one for each query group.

    Raises:
        ValueError: The rows are not a whole number of query groups.
    """
    if split_shapes is None:
        return (((0, num_rows),),)
    group_rows = sum(split_shapes)
    if num_rows % group_rows:
        raise ValueError(
            f"qkv split: expected a multiple of {group_rows} rows ({list(split_shapes)} a query "
            f"group), got {num_rows}. Use --muon-no-split-qkv for this model."
        )
    blocks, first = [], 0
    for rows in split_shapes:
        starts = range(first, num_rows, group_rows)
        blocks.append(tuple((start, start + rows) for start in starts))
        first += rows
    return tuple(blocks)


def whole_matrix(
    fqn: str,
    layout: RowLayout,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    partition_dim: int | None = None,
    split_shapes: Sequence[int] | None = None,
    domain: tuple[int, ...] | None = None,
) -> MatrixLayout:
    """Put the row shards of all ranks together to the matrices that Newton-Schulz sees.

    Args:
        fqn: Fully qualified name of the parameter.
        layout: Row shards of the tensor-parallel-local matrix, the same on every tensor rank.
        ranks: Ranks of the job that hold a shard, as ``ranks[tensor_rank][shard]``; several where
            shards are replicated. One tensor rank where each orthogonalizes its own matrix.
        partition_dim: Dimension that the tensor ranks cut; None with a single one.
        split_shapes: See :func:`qkv_blocks`.
        domain: Ranks that may own the matrix; None for all that are named in ``ranks``.

    Raises:
        ValueError: Several tensor ranks without ``partition_dim``, another number of shards, or
            rows that do not split.
    """
    num_tensor_ranks = len(ranks)
    if num_tensor_ranks > 1 and partition_dim not in (0, 1):
        raise ValueError(
            f"{fqn}: expected partition_dim 0 or 1 to join {num_tensor_ranks} tensor-parallel "
            f"ranks, got {partition_dim}. Pass the ranks of one tensor-parallel rank only."
        )
    if any(len(shards) != len(layout.shards) for shards in ranks):
        raise ValueError(
            f"{fqn}: expected the ranks of {len(layout.shards)} shards, got "
            f"{[len(shards) for shards in ranks]}. Pass the ranks the rows are cut over."
        )
    blocks = qkv_blocks(layout.num_rows, split_shapes)
    shapes, fragments = [], []
    for block, runs in enumerate(blocks):
        local_rows = sum(stop - start for start, stop in runs)
        across = num_tensor_ranks if partition_dim == 1 else 1
        shapes.append((local_rows * (num_tensor_ranks // across), layout.num_cols * across))
        for tensor_rank, shards in enumerate(ranks):
            row = tensor_rank * local_rows if partition_dim == 0 else 0
            col = tensor_rank * layout.num_cols if partition_dim == 1 else 0
            for run_start, run_stop in runs:
                for shard, first, last in layout.overlaps(run_start, run_stop):
                    fragments.append(
                        Fragment(
                            tuple(shards[shard]),
                            block,
                            row + first - run_start,
                            last - first,
                            col,
                            layout.num_cols,
                            first - layout.shards[shard][0],
                        )
                    )
                row += run_stop - run_start
    if domain is None:
        domain = tuple(sorted({rank for shards in ranks for each in shards for rank in each}))
    return MatrixLayout(fqn, tuple(shapes), tuple(fragments), domain)
