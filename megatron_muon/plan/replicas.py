# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The way of results: from an owner to one replica of a shard, and from there to the others.

One shard with two replicas, on ranks 0 and 4, and the results of three owners::

              owners 0, 1, 5           scatter                    all-gather

    rank 0    0 0 0 0                  0 0 0 0 | 1 1              0 0 0 0 1 1 | 1 5 5 5 5 _
                        1 1 1  --->                    <------>
    rank 4              5 5 5 5        1 | 5 5 5 5 _              the same

Every replica gets an equal chunk, so that they can all-gather the chunks in place. An owner fills
the chunk of its nearest replica first; the rest goes to the others. So nearly every result crosses
to another node once for each replica there, as if the owner sent to all of them, and leaves the
owner only once.

A bucket may have several scatters: then every owner sends an equal fraction of its results in each,
and replicas need memory for that fraction of the bucket at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.routes import Route, cut, nearest_holder

# Elements that the chunk of a replica is a multiple of: 16 bytes of bf16, so that kernels of NCCL
# read and write 16 bytes at once in each chunk.
_CHUNK_MULTIPLE = 8


class Share(NamedTuple):
    """Results that an owner sends to one replica.

    Args:
        owner: Rank that orthogonalized them.
        holder: Rank that they are sent to.
        start: First element, of all that the owner has for this shard in the bucket.
        stop: Element after the last one.
        offset: First element in the memory of each holder, once they have been all-gathered.
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
        chunk: Elements of each; the last ones may be unused.
        shares: Of all owners, by holder, then by owner.
    """

    holders: tuple[int, ...]
    chunk: int
    shares: tuple[Share, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the memory of each holder."""
        return self.chunk * len(self.holders)

    @property
    def num_passed_on(self) -> int:
        """Elements that each replica gets from the others."""
        return self.chunk * (len(self.holders) - 1)


def scatters_of(
    holders: tuple[int, ...], elements: Mapping[int, int], num_scatters: int, cost: CostModel
) -> Iterator[ShardScatter]:
    """Yield the scatters of a bucket to the replicas of one shard.

    Args:
        holders: The replicas, ascending.
        elements: Of each owner's results for the shard. An owner that is the only holder is left
            out: nothing travels.
        num_scatters: Scatters of the bucket.
        cost: Knows which ranks share a node.
    """
    owners = sorted(elements)
    for number in range(num_scatters):
        # An equal fraction of each owner: otherwise a few links would carry the whole scatter.
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
    """Yield where the results of each owner go, by holder."""
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
        # By owner: that is the order in which all_to_all_single delivers.
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
