# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Routes of the rectangles of a matrix: from a source to an owner, and back to all holders.

One list of routes serves both directions: the scatter sends back the rectangles of the gather, so
the two cannot disagree.

Results go from an owner to one replica of a shard, and from there to the others. One
shard with two replicas, on ranks 0 and 4, and the results of three owners::

              owners 0, 1, 5           scatter                    all-gather

    rank 0    0 0 0 0                  0 0 0 0 | 1 1              0 0 0 0 1 1 | 1 5 5 5 5 _
                        1 1 1  --->                    <------>
    rank 4              5 5 5 5        1 | 5 5 5 5 _              the same

Every replica gets an equal chunk, so that they can all-gather the chunks in place. An owner fills
the chunk of its nearest replica first; the rest goes to the others. So nearly every result crosses
to another node once per replica there, as if the owner sent to all of them, and leaves the owner
only once.

A bucket may have several scatters: then every owner sends an equal fraction of its results
per scatter, and replicas need memory for that fraction of the bucket at a time.
"""

import functools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout

# Multiple of a replica's chunk, in elements: 16 bytes of bf16, which kernels of NCCL read and write
# at once.
_CHUNK_MULTIPLE = 8


class Part(NamedTuple):
    """The rectangle of a block that one owner orthogonalizes.

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
    """Split a block along its longer side into equal parts, one per owner.

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
        cost: Nodes of the ranks; the replica nearest to the owner sends.
        holder: Only routes with this holder; None for all.
    """
    parts = [parts_of(index, block, shape, owners) for block, shape in enumerate(matrix.blocks)]
    for region in matrix.regions:
        # Checked before routes are made: of thousands of holders a rank is one.
        if holder is not None and holder not in region.holders:
            continue
        # Parts tile the block, so these rectangles tile the region.
        for part in parts[region.block]:
            row, col = max(region.row, part.row), max(region.col, part.col)
            num_rows = min(region.row + region.num_rows, part.row + part.num_rows) - row
            num_cols = min(region.col + region.num_cols, part.col + part.num_cols) - col
            if num_rows > 0 and num_cols > 0:
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
    # Elements follow one another row by row, so a range has pieces of its first and its last row,
    # and whole rows between: three rectangles, one copy each.
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
    """Return the owner itself if it is a holder, otherwise the holder nearest to it.

    Args:
        holders: Ranks, ascending.
        owner: The owner.
        cost: Nodes of the ranks.
    """
    if len(holders) == 1:
        return holders[0]
    position = bisect_right(holders, owner)
    if position and holders[position - 1] == owner:
        return owner
    # By node first, since only that changes the link. There the next lower rank, cyclically: evenly
    # spaced replicas then serve equally many owners. By distance, the first and the last would
    # serve up to three times as many as others.
    on_node = _by_node(holders, cost.ranks_per_node).get(cost.node(owner), holders)
    return on_node[bisect_right(on_node, owner) - 1]


# Thousands of owners look for the nearest of the same replicas.
@functools.lru_cache(maxsize=4096)
def _by_node(holders: tuple[int, ...], ranks_per_node: int) -> dict[int, list[int]]:
    by_node: dict[int, list[int]] = {}
    for holder in holders:
        by_node.setdefault(holder // ranks_per_node, []).append(holder)
    return by_node


class Share(NamedTuple):
    """Results that an owner sends to one replica.

    Args:
        owner: Rank that orthogonalized them.
        holder: Rank that they are sent to.
        start: First element, in the owner's results for this shard in the bucket.
        stop: Element after the last one.
        offset: First element in the memory of every holder, after the all-gather.
    """

    owner: int
    holder: int
    start: int
    stop: int
    offset: int

    @property
    def num_elements(self) -> int:
        """Elements of the share."""
        return self.stop - self.start


class ShardScatter(NamedTuple):
    """Results that the replicas of one shard receive in one scatter.

    Args:
        holders: The replicas, ascending.
        chunk: Elements per holder; the last ones may be unused.
        shares: Of all owners, by holder, then by owner.
    """

    holders: tuple[int, ...]
    chunk: int
    shares: tuple[Share, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the memory of a holder."""
        return self.chunk * len(self.holders)

    @property
    def num_passed_on(self) -> int:
        """Elements that a replica gets from the others."""
        return self.chunk * (len(self.holders) - 1)


def scatters_of(
    holders: tuple[int, ...], elements: Mapping[int, int], num_scatters: int, cost: CostModel
) -> Iterator[ShardScatter]:
    """Yield the scatters of a bucket to the replicas of one shard.

    Args:
        holders: The replicas, ascending.
        elements: Elements of results for the shard, by owner. An owner that is the only holder is
            left out: nothing travels.
        num_scatters: Scatters of the bucket.
        cost: Nodes of the ranks.
    """
    owners = sorted(elements)
    for number in range(num_scatters):
        # An equal fraction per owner: otherwise a few links would carry the whole scatter.
        ranges = [
            (owner, elements[owner] * number // num_scatters,
             elements[owner] * (number + 1) // num_scatters)
            for owner in owners
        ]  # fmt: skip
        total = sum(stop - start for _, start, stop in ranges)
        chunk = total
        if len(holders) > 1:
            chunk = -(-total // (len(holders) * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE
        yield ShardScatter(holders, chunk, tuple(_shares(holders, chunk, ranges, cost)))


def _shares(
    holders: tuple[int, ...], chunk: int, ranges: Sequence[tuple[int, int, int]], cost: CostModel
) -> Iterator[Share]:
    """Yield the shares of the owners, by holder."""
    room = dict.fromkeys(holders, chunk)
    pieces: dict[int, list[tuple[int, int, int]]] = {holder: [] for holder in holders}
    left = []
    for owner, start, stop in ranges:
        nearest = nearest_holder(holders, owner, cost)
        end = min(stop, start + room[nearest])
        if end > start:
            pieces[nearest].append((owner, start, end))
            room[nearest] -= end - start
        if end < stop:
            left.append((owner, end, stop))
    for owner, start, stop in left:
        node = cost.node(owner)
        for holder in sorted(
            (holder for holder in holders if room[holder]),
            key=lambda rank: (cost.node(rank) != node, rank),
        ):
            end = min(stop, start + room[holder])
            pieces[holder].append((owner, start, end))
            room[holder] -= end - start
            start = end
            if start == stop:
                break
    for position, holder in enumerate(holders):
        offset = position * chunk
        # By owner, the order of all_to_all_single.
        for owner, start, stop in sorted(pieces[holder]):
            yield Share(owner, holder, start, stop, offset)
            offset += stop - start


def routes_of_share(routes: Sequence[Route], share: Share) -> Iterator[Route]:
    """Yield the rectangles of a share, in order.

    Args:
        routes: All routes of the share's owner to the shard in the bucket, in plan order.
        share: The share.
    """
    first = 0
    for route in routes:
        start = max(share.start - first, 0)
        stop = min(share.stop - first, route.num_elements)
        if start < stop:
            yield from cut(route, start, stop)
        first += route.num_elements
