# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Routes of the rectangles of a matrix: from a source to an owner, and back to all holders.

One list of routes serves both ways: the scatter sends back what the gather brought. The way back is
never computed a second time, so the two cannot disagree.
"""

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, Region


class Part(NamedTuple):
    """The rectangle of a block that one owner orthogonalizes.

    Args:
        matrix: Index of the matrix in the plan.
        block: Index of the block.
        owners: Ranks that orthogonalize the block together; one unless it is split.
        owner: The one of them that has this part.
        row: First row in the block.
        num_rows: Rows.
        col: First column in the block.
        num_cols: Columns.
    """

    matrix: int
    block: int
    owners: tuple[int, ...]
    owner: int
    row: int
    num_rows: int
    col: int
    num_cols: int


class Route(NamedTuple):
    """A rectangle that is exchanged between shards and a part.

    Args:
        matrix: Index of the matrix in the plan.
        block: Index of the block.
        owner: Rank that orthogonalizes it.
        source: Rank that sends it to the owner; the owner itself where it holds it.
        holders: Ranks that get the result.
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


def parts_of(index: int, block: int, shape: tuple[int, int], owners: tuple[int, ...]) -> list[Part]:
    """Split a block along its longer side into equal parts, one for each owner.

    The shorter side stays whole: the Gram matrix has its size, and parts of the longer side only
    add up to it.

    Args:
        index: Index of the matrix in the plan.
        block: Index of the block.
        shape: ``(rows, cols)`` of the block.
        owners: Ranks of the job that own it.
    """
    rows, cols = shape
    length = max(shape)
    # Rounded down one by one: parts differ by at most a row, and the borders of all fit together.
    borders = [length * number // len(owners) for number in range(len(owners) + 1)]
    ranges = zip(owners, borders, borders[1:], strict=False)
    if rows > cols:
        return [
            Part(index, block, owners, owner, start, stop - start, 0, cols)
            for owner, start, stop in ranges
        ]
    return [
        Part(index, block, owners, owner, 0, rows, start, stop - start)
        for owner, start, stop in ranges
    ]


def routes_of(
    index: int,
    matrix: MatrixLayout,
    owners: tuple[int, ...],
    cost: CostModel,
    holder: int | None = None,
) -> Iterator[Route]:
    """Yield the routes of a matrix: together they tile it, each element once.

    Args:
        index: Index of the matrix in the plan.
        matrix: Its layout.
        owners: Ranks of the job that own it.
        cost: Knows which ranks share a node; the replica nearest to the owner sends.
        holder: Only the routes of which this rank is a holder; None for all.
    """
    parts = [parts_of(index, block, shape, owners) for block, shape in enumerate(matrix.blocks)]
    for region in matrix.regions:
        # Checked before routes are made: of thousands of holders a rank is one.
        if holder is not None and holder not in region.holders:
            continue
        for part, row, num_rows, col, num_cols in overlaps(region, parts[region.block]):
            yield Route(
                matrix=index,
                block=region.block,
                owner=part.owner,
                source=nearest_holder(region.holders, part.owner, cost),
                holders=region.holders,
                row=row - part.row,
                num_rows=num_rows,
                col=col - part.col,
                num_cols=num_cols,
                local_row=region.local_row + row - region.row,
                local_col=col - region.col,
            )


def overlaps(region: Region, parts: Sequence[Part]) -> Iterator[tuple[Part, int, int, int, int]]:
    """Yield what a region shares with the parts of its block.

    Parts tile the block, so these rectangles tile the region.

    Yields:
        The part, and first row, rows, first column and columns of the rectangle, in the block.
    """
    if len(parts) == 1:
        # A shortcut: most matrices have one owner, whose part is the whole block.
        yield parts[0], region.row, region.num_rows, region.col, region.num_cols
        return
    for part in parts:
        top, left = max(region.row, part.row), max(region.col, part.col)
        height = min(region.row + region.num_rows, part.row + part.num_rows) - top
        width = min(region.col + region.num_cols, part.col + part.num_cols) - left
        if height > 0 and width > 0:
            yield part, top, height, left, width


def cut(route: Route, start: int, stop: int) -> Iterator[Route]:
    """Yield the rectangles that some elements of a route form, in order.

    Args:
        route: The route; a message holds it row by row.
        start: First element.
        stop: Element after the last one.
    """
    # Nearly every route is whole: borders are few.
    if stop - start == route.num_elements:
        yield route
        return
    # Elements follow one another row by row, so a range has parts of its first and its last row,
    # and whole rows between: three rectangles, each of which one copy can move.
    row, col = divmod(start, route.num_cols)
    last_row, last_col = divmod(stop, route.num_cols)
    if row == last_row:
        yield _rectangle(route, row, 1, col, last_col - col)
        return
    if col:
        yield _rectangle(route, row, 1, col, route.num_cols - col)
        row += 1
    if row < last_row:
        yield _rectangle(route, row, last_row - row, 0, route.num_cols)
    if last_col:
        yield _rectangle(route, last_row, 1, 0, last_col)


def _rectangle(route: Route, row: int, num_rows: int, col: int, num_cols: int) -> Route:
    return route._replace(
        row=route.row + row,
        num_rows=num_rows,
        col=route.col + col,
        num_cols=num_cols,
        local_row=route.local_row + row,
        local_col=route.local_col + col,
    )


def nearest_holder(holders: tuple[int, ...], owner: int, cost: CostModel) -> int:
    """Return the owner itself where it is one of some holders, or the nearest of them.

    Args:
        holders: Ranks, ascending.
        owner: The owner.
        cost: Knows which ranks share a node.
    """
    if len(holders) == 1:
        return holders[0]
    position = bisect_right(holders, owner)
    if position and holders[position - 1] == owner:
        return owner
    # By node first, since only that changes the link. There the next lower rank, cyclically: evenly
    # spaced replicas then serve equally many owners. By distance, those at either end would serve
    # up to three times as many as others.
    on_node = _by_node(holders, cost.ranks_per_node).get(cost.node(owner), holders)
    return on_node[bisect_right(on_node, owner) - 1]


# Thousands of owners look for the nearest of the same replicas.
@functools.lru_cache(maxsize=4096)
def _by_node(holders: tuple[int, ...], ranks_per_node: int) -> dict[int, list[int]]:
    by_node: dict[int, list[int]] = {}
    for holder in holders:
        by_node.setdefault(holder // ranks_per_node, []).append(holder)
    return by_node
