# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Where every element of a matrix goes: from its holder to its owner, and back to all holders.

Vocabulary:

==============  ================================================================================
part            what one owner orthogonalizes of a block: all of it, or a slice of its longer side
piece           the intersection of a fragment and a part: a rectangle that travels as one
source          the holder that sends a piece to its owner; the owner itself where it has it
==============  ================================================================================
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import Fragment, MatrixLayout


class Part(NamedTuple):
    """The rectangle of a block that one owner orthogonalizes.

    Args:
        owner: Rank of the job.
        row: First row in the block.
        num_rows: Rows.
        col: First column in the block.
        num_cols: Columns.
    """

    owner: int
    row: int
    num_rows: int
    col: int
    num_cols: int


class Piece(NamedTuple):
    """A rectangle on its way between shards and a part.

    Args:
        matrix: Index of the matrix.
        block: Index of the block.
        owner: Rank that orthogonalizes it.
        source: Rank that sends it to the owner; the owner itself where it holds it.
        holders: Ranks that get it back.
        row: First row in the part.
        num_rows: Rows.
        col: First column in the part.
        num_cols: Columns.
        local_row: First row in the holders' shards.
        local_col: First column in the holders' shards.
    """

    matrix: int
    block: int
    owner: int
    source: int
    holders: tuple[int, ...]
    row: int
    num_rows: int
    col: int
    num_cols: int
    local_row: int
    local_col: int

    @property
    def num_elements(self) -> int:
        """Elements of the rectangle."""
        return self.num_rows * self.num_cols


def parts_of(shape: tuple[int, int], owners: Sequence[int]) -> list[Part]:
    """Cut a block along its longer side into equal parts, one for each owner."""
    rows, cols = shape
    num_parts = len(owners)
    length = max(rows, cols)
    bounds = [length * index // num_parts for index in range(num_parts + 1)]
    cuts = zip(owners, bounds, bounds[1:], strict=False)
    if rows > cols:
        return [Part(owner, start, stop - start, 0, cols) for owner, start, stop in cuts]
    return [Part(owner, 0, rows, start, stop - start) for owner, start, stop in cuts]


def pieces_of(
    index: int, matrix: MatrixLayout, owners: Sequence[int], cost: CostModel
) -> Iterator[Piece]:
    """Yield the pieces of a matrix: together they tile it, each once.

    Args:
        index: Index of the matrix in the plan.
        matrix: Its layout.
        owners: Ranks of the job that own it.
        cost: Tells which ranks share a node; of several holders the nearest sends.
    """
    for fragment, part, row, num_rows, col, num_cols in _intersections(matrix, owners):
        yield Piece(
            matrix=index,
            block=fragment.block,
            owner=part.owner,
            source=_source(fragment.holders, part.owner, cost),
            holders=fragment.holders,
            row=row - part.row,
            num_rows=num_rows,
            col=col - part.col,
            num_cols=num_cols,
            local_row=fragment.local_row + row - fragment.row,
            local_col=col - fragment.col,
        )


def moves_of(
    matrix: MatrixLayout, owners: Sequence[int], cost: CostModel
) -> Iterator[tuple[int, int, int, int]]:
    """Yield what travels of a matrix: holder, owner, elements there, elements back."""
    for fragment, part, _, num_rows, _, num_cols in _intersections(matrix, owners):
        elements = num_rows * num_cols
        source = _source(fragment.holders, part.owner, cost)
        for holder in fragment.holders:
            if holder != part.owner:
                yield holder, part.owner, elements if holder == source else 0, elements


def _intersections(
    matrix: MatrixLayout, owners: Sequence[int]
) -> Iterator[tuple[Fragment, Part, int, int, int, int]]:
    """Yield each fragment with each part it meets, and the common rows and columns in the block."""
    parts = [parts_of(shape, owners) for shape in matrix.blocks]
    for fragment in matrix.fragments:
        row, num_rows, col, num_cols = fragment[2:6]
        for part in parts[fragment.block]:
            if part.num_rows >= row + num_rows and part.num_cols >= col + num_cols:
                # Most matrices have one part, which starts at 0.
                if part.row == 0 and part.col == 0:
                    yield fragment, part, row, num_rows, col, num_cols
                    break
            first, left = max(row, part.row), max(col, part.col)
            height = min(row + num_rows, part.row + part.num_rows) - first
            width = min(col + num_cols, part.col + part.num_cols) - left
            if height > 0 and width > 0:
                yield fragment, part, first, height, left, width


def _source(holders: tuple[int, ...], owner: int, cost: CostModel) -> int:
    if len(holders) == 1 or owner in holders:
        return owner if owner in holders else holders[0]
    node = cost.node(owner)
    return min(holders, key=lambda rank: (cost.node(rank) != node, abs(rank - owner), rank))
