# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Routes of the rectangles of a matrix: from a source to an owner, and back to all holders.

One list of routes serves both directions: the scatter sends back the rectangles of the gather, so
the two cannot disagree.

Results go from an owner to one replica of a shard, and from there to the others. One shard with two
replicas, on ranks 0 and 4, and the results of three owners::

              owners 0, 1, 5           scatter                    all-gather

    rank 0    0 0 0 0                  0 0 0 0 | 1 1              0 0 0 0 1 1 | 1 5 5 5 5 _
                        1 1 1  --->                    <------>
    rank 4              5 5 5 5        1 | 5 5 5 5 _              the same

Results are in the order of owners, and every replica gets an equal section of them, so that they
can all-gather the sections in place. Ranks of a node are consecutive, owners as well as replicas:
most owners send to a replica on their own node if there is one.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_muon.plan.layout import MatrixLayout, MatrixShape, Ranks

# Multiples of 8 elements: 16 bytes of bf16, which NCCL's kernels read and write at once.
_SECTION_MULTIPLE = 8
# The kernel that moves rectangles counts the elements of one in 32 bits.
MOST_ELEMENTS = 2**30


class Part(NamedTuple):
    """Rectangle of a block that one owner orthogonalizes.

    Args:
        matrix: Index of the matrix in the plan.
        block: Index of the block.
        owners: Ranks that orthogonalize the block together; one unless it is split.
        owner: The owner of this part.
        row: First row in the block.
        num_rows: Rows.
        col: First column in the block.
        num_cols: Columns.
    """

    matrix: int
    block: int
    owners: Ranks
    owner: int
    row: int
    num_rows: int
    col: int
    num_cols: int


class Route(NamedTuple):
    """Rectangle that is exchanged between shards and a part.

    Args:
        matrix: Index of the matrix in the plan.
        block: Index of the block.
        owner: Rank that orthogonalizes it.
        source: Rank that sends it to the owner; the owner itself if it is a holder.
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
    holders: Ranks
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


# Parts of one shape, orthogonalized by one call of Newton-Schulz.
type Stack = tuple[Part, ...]


def stack_elements(stack: Stack) -> int:
    """Count the elements that a stack takes: a multiple of 128.

    The next stack then begins at a multiple of 256 bytes, as every allocation of CUDA does. GPUs
    choose kernels by alignment: at other addresses products can have other bits, and take longer.
    """
    return -(-sum(part.num_rows * part.num_cols for part in stack) // 128) * 128


def parts_of(index: int, block: int, shape: MatrixShape, owners: Ranks) -> Iterator[Part]:
    """Split a block ``(rows, cols)`` along its longer side into equal parts, one per owner.

    The shorter side stays whole: the Gram matrix has its size, and parts of the longer side only
    add up to it.
    """
    rows, cols = shape
    length = max(shape)
    # Rounded down one by one: parts differ by at most a row, and the borders of all fit together.
    borders = [length * number // len(owners) for number in range(len(owners) + 1)]
    for owner, (start, stop) in zip(owners, itertools.pairwise(borders), strict=True):
        size = stop - start
        rectangle = (start, size, 0, cols) if rows > cols else (0, rows, start, size)
        yield Part(index, block, owners, owner, *rectangle)


def routes_of(
    index: int, matrix: MatrixLayout, owners: Ranks, holder: int | None = None
) -> Iterator[Route]:
    """Yield the routes of a matrix, or only the routes with a given holder.

    All routes together tile the matrix. Of several replicas, ``source_of()`` chooses the source.
    """
    parts = [
        list(parts_of(index, block, shape, owners)) for block, shape in enumerate(matrix.blocks)
    ]
    for region in matrix.regions:
        # Checked before routes are made: a rank may be one of thousands of holders.
        if holder is not None and holder not in region.holders:
            continue
        # Parts tile the block, so these rectangles tile the region.
        for part in parts[region.block]:
            row, col = max(region.row, part.row), max(region.col, part.col)
            num_rows = min(region.row + region.num_rows, part.row + part.num_rows) - row
            num_cols = min(region.col + region.num_cols, part.col + part.num_cols) - col
            if num_rows <= 0 or num_cols <= 0:
                continue
            most_rows = max(1, MOST_ELEMENTS // num_cols)
            for first in range(row, row + num_rows, most_rows):
                yield Route(
                    matrix=index,
                    block=region.block,
                    owner=part.owner,
                    source=source_of(region.holders, part.owner),
                    holders=region.holders,
                    row=first - part.row,
                    num_rows=min(most_rows, row + num_rows - first),
                    col=col - part.col,
                    num_cols=num_cols,
                    local_row=region.local_row + first - region.row,
                    local_col=col - region.col,
                )


def cut(route: Route, start: int, stop: int) -> Iterator[Route]:
    """Yield the rectangles of elements ``[start, stop)`` of a route, row by row."""
    # At most three rectangles, one copy each: the end of a row, whole rows, the start of a row.
    while start < stop:
        row, col = divmod(start, route.num_cols)
        num_rows, num_cols = (stop - start) // route.num_cols, route.num_cols
        if col or not num_rows:
            num_rows, num_cols = 1, min(stop - start, route.num_cols - col)
        yield route._replace(
            row=route.row + row,
            num_rows=num_rows,
            col=route.col + col,
            num_cols=num_cols,
            local_row=route.local_row + row,
            local_col=route.local_col + col,
        )
        start += num_rows * num_cols


def source_of(holders: Ranks, owner: int) -> int:
    """Return the owner itself if it is a holder, otherwise the next lower holder, cyclically.

    Evenly spaced replicas then serve equally many owners. Rejected: a holder on the owner's node
    first; in 8 instances a step of Llama-3-8B was 3 ms shorter, 0.05 % of an iteration.
    """
    return holders[bisect_right(holders, owner) - 1]


def section_size(num_replicas: int, num_elements: int) -> int:
    """Return the elements of a replica's section, of all results of a bucket for one shard."""
    multiple = _SECTION_MULTIPLE if num_replicas > 1 else 1
    return -(-num_elements // (num_replicas * multiple)) * multiple


def results_of(routes: Iterable[Route], size: int) -> Iterator[tuple[int, Route]]:
    """Yield the results for one shard in the order of owners, cut at the ends of sections.

    Args:
        routes: All routes of the shard in a bucket.
        size: Elements of a section.

    Yields:
        Position of a rectangle in the memory of every replica after the all-gather, and the
        rectangle, which is in one section.
    """
    offset = 0
    for route in sorted(routes, key=lambda route: route.owner):
        start = 0
        while start < route.num_elements:
            stop = min(route.num_elements, start + size - offset % size)
            for result in cut(route, start, stop):
                yield offset, result
                offset += result.num_elements
            start = stop
