# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Row ranges of a matrix over the ranks of a group: integers only, no tensors, no communication.

Vocabulary:

==============  ================================================================================
matrix          one 2-D parameter as tensor parallelism leaves it on this rank, ``(rows, cols)``
row shard       the contiguous rows ``[start, stop)`` of a matrix that one rank holds, maybe none
layout          the row shards of one matrix, by rank of the group they are cut over
==============  ================================================================================
"""

from dataclasses import dataclass


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
