# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which rows of a matrix: integers only, no tensors, no communication."""

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class RowLayout:
    """The rows that each rank of a group holds of one parameter.

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
        # Shards need not ascend with the rank: HFSDP numbers ranks in another order than rows.
        # Empty shards may stand anywhere, so only the others are put in order.
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
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        return (self.num_rows, self.num_cols)

    @property
    def max_shard_rows(self) -> int:
        """Rows of the largest shard."""
        return max(stop - start for start, stop in self.shards)

    def shard_rows(self, rank: int) -> int:
        """Count the rows that ``rank`` of the group holds."""
        start, stop = self.shards[rank]
        return stop - start

    # Looked up once for each row range of each block: with query, key and value that is once for
    # each query group. A scan of all shards there would make planning quadratic in ranks.
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
    """Return the row shards of a matrix that lies in a flat buffer.

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
    # A rank whose range misses the matrix gets an empty shard at its nearer end.
    for flat_start, flat_stop in flat_ranges:
        start = min(max(flat_start - item_start, 0), num_elements)
        stop = min(max(flat_stop - item_start, 0), num_elements)
        # A Region is a rectangle of whole rows: a border inside a row cannot be described.
        if start % num_cols or stop % num_cols:
            raise ValueError(
                f"row shards: expected boundaries at whole rows of {num_cols} elements, got "
                f"elements [{start}, {stop}). Megatron-FSDP shards whole rows; report this model."
            )
        shards.append((start // num_cols, stop // num_cols))
    return RowLayout(num_rows, num_cols, tuple(shards))


def hfsdp_shard_of_rank(rank: int, num_inner: int, num_outer: int) -> int:
    """Return the shard that a rank of the HFSDP group holds.

    The group counts the inner ranks of the first instance, then those of the second. Megatron-FSDP
    shards over the inner ranks first, and over the outer ranks within: consecutive shards lie on
    the same inner rank of different instances.

    Source: ``DataParallelBuffer`` of megatron-core 0.19.2 with ``hsdp_outer_dp_shard``.
    """
    return rank % num_inner * num_outer + rank // num_inner


class Region(NamedTuple):
    """The rectangle of a block that lies in one shard.

    Args:
        holders: Ranks of the job that hold it, more than one where shards are replicated.
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
    """Where every region of a matrix lies, and which ranks may own the matrix.

    Args:
        fqn: Fully qualified name of the parameter.
        blocks: Shape ``(rows, cols)`` of each block, whole over tensor parallelism where its mode
            asks for that.
        regions: Rectangles that tile the blocks.
        ranks: Ranks of the job that may own the matrix, ascending; every holder is one of them.
        has_copies: Whether other tensor-parallel ranks have a matrix of the same values. Each of
            them is orthogonalized whole and alone, so that all results have the same bits: stacks
            and parts would differ where plans do.
        is_transposed: Whether it is stored as (inputs, outputs), so that its result is scaled as
            that of its transpose.

    Raises:
        ValueError: Regions that do not have as many elements as the blocks, or a holder that may
            not own the matrix.
    """

    fqn: str
    blocks: tuple[tuple[int, int], ...]
    regions: tuple[Region, ...]
    ranks: tuple[int, ...]
    has_copies: bool = False
    is_transposed: bool = False

    def __post_init__(self) -> None:
        """Check the regions against the blocks."""
        # A count is enough here: whole_matrix derives regions from a RowLayout, which has checked
        # that no row is missing or held twice.
        tiled = sum(region.num_rows * region.num_cols for region in self.regions)
        if tiled != self.num_elements:
            raise ValueError(
                f"{self.fqn}: expected regions with {self.num_elements} elements in all, as its "
                f"blocks {self.blocks} have, got {tiled}. Build the layout with whole_matrix()."
            )
        strangers = set(self.elements_by_rank).difference(self.ranks)
        if strangers:
            raise ValueError(
                f"{self.fqn}: expected every holder among the ranks that may own it, got ranks "
                f"{sorted(strangers)}. Pass the whole domain."
            )

    @property
    def num_elements(self) -> int:
        """Elements of all blocks."""
        return sum(rows * cols for rows, cols in self.blocks)

    @cached_property
    def elements_by_rank(self) -> dict[int, int]:
        """Count the elements that each rank holds; ranks that hold none are left out."""
        return _elements_by_rank(self.regions)


# Shared by matrices of one tiling, as those of all layers have.
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
    """Return which rows of a matrix form each block.

    Args:
        num_rows: Rows of the matrix.
        split_shapes: Rows of one query group that go to each block, such as query, key and value;
            None for a matrix that is one block.

    Returns:
        For each block its row ranges, one for each query group.

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


def whole_matrix(
    fqn: str,
    layout: RowLayout,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    partition_dim: int | None = None,
    split_shapes: Sequence[int] | None = None,
    domain: tuple[int, ...] | None = None,
    has_copies: bool = False,
) -> MatrixLayout:
    """Join the row shards of all ranks to the matrix that Newton-Schulz sees.

    Args:
        fqn: Fully qualified name of the parameter.
        layout: Row shards of the tensor-parallel-local matrix, the same on every tensor rank.
        ranks: Ranks of the job that hold a shard, as ``ranks[tensor_rank][shard]``; several where
            shards are replicated. One tensor rank where each orthogonalizes its own matrix.
        partition_dim: Dimension that tensor parallelism shards; None with a single tensor rank.
        split_shapes: See :func:`block_rows`.
        domain: Ranks that may own the matrix; None for all that are named in ``ranks``.
        has_copies: See :class:`MatrixLayout`.

    Raises:
        ValueError: Several tensor ranks without ``partition_dim``, another number of shards, or
            rows that do not split.
    """
    # Both checks are of our own callers. Without them the result would be a matrix of wrong shape.
    num_tensor_ranks = len(ranks)
    if num_tensor_ranks > 1 and partition_dim not in (0, 1):
        raise ValueError(
            f"{fqn}: expected partition_dim 0 or 1 to join {num_tensor_ranks} tensor-parallel "
            f"ranks, got {partition_dim}. Pass the ranks of one tensor-parallel rank only."
        )
    if any(len(shards) != len(layout.shards) for shards in ranks):
        raise ValueError(
            f"{fqn}: expected the ranks of {len(layout.shards)} shards, got "
            f"{[len(shards) for shards in ranks]}. Pass the ranks that the rows are sharded over."
        )
    holders = tuple(tuple(tuple(cell) for cell in shards) for shards in ranks)
    blocks, regions = _tiling(
        layout, holders, partition_dim, None if split_shapes is None else tuple(split_shapes)
    )
    if domain is None:
        domain = tuple(sorted({rank for shards in holders for cell in shards for rank in cell}))
    return MatrixLayout(fqn, blocks, regions, domain, has_copies)


# All layers of a kind have equal layouts: they share the regions, of which a matrix over 16,384
# ranks has thousands, and what is worked out from them.
@functools.lru_cache(maxsize=256)
def _tiling(
    layout: RowLayout,
    ranks: tuple[tuple[tuple[int, ...], ...], ...],
    partition_dim: int | None,
    split_shapes: tuple[int, ...] | None,
) -> tuple[tuple[tuple[int, int], ...], tuple[Region, ...]]:
    """Return blocks and regions; arguments as for :func:`whole_matrix`."""
    shapes: list[tuple[int, int]] = []
    regions: list[Region] = []
    for block, row_ranges in enumerate(block_rows(layout.num_rows, split_shapes)):
        local_rows = sum(stop - start for start, stop in row_ranges)
        shape = (local_rows, layout.num_cols)
        # Where one tensor rank's rows or columns of the block start, and how large the joined block
        # is. Each tensor rank splits query, key and value of its own heads, so their shares of a
        # block follow one another although the rows of the parameter do not.
        for tensor_rank, holders in enumerate(ranks):
            row = tensor_rank * local_rows if partition_dim == 0 else 0
            col = tensor_rank * layout.num_cols if partition_dim == 1 else 0
            regions += _regions_of_block(block, row, col, row_ranges, layout, holders)
            shape = (max(shape[0], row + local_rows), max(shape[1], col + layout.num_cols))
        shapes.append(shape)
    return tuple(shapes), tuple(regions)


def _regions_of_block(
    block: int,
    row: int,
    col: int,
    row_ranges: Sequence[RowRange],
    layout: RowLayout,
    holders: Sequence[Sequence[int]],
) -> Iterator[Region]:
    """Yield the regions of a block that one tensor rank's shards hold.

    Args:
        block: Index of the block.
        row: Row of the block at which this tensor rank starts.
        col: Column of the block at which it starts.
        row_ranges: Rows of the parameter that form the block, in the order they have in it.
        layout: Row shards of the parameter.
        holders: Ranks of the job that hold each shard.
    """
    for start, stop in row_ranges:
        # A shard border may fall inside a range: query, key and value do not end where shards do.
        for shard, first, last in layout.overlaps(start, stop):
            yield Region(
                holders=tuple(holders[shard]),
                block=block,
                row=row + first - start,
                num_rows=last - first,
                col=col,
                num_cols=layout.num_cols,
                local_row=first - layout.shards[shard][0],
            )
        row += stop - start
