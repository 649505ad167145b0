# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Deal matrices out to buckets, and put the buckets in order.

Buckets are slices of time: what a rank owns is dealt out longest first, so that each bucket holds
about the same share of its time.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in each bucket most ranks would wait for the few that own some
(:mod:`megatron_muon.plan.step_estimate`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_muon.plan.step_estimate import BucketSeconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix

# Numbers of buckets to try. One bucket overlaps nothing; with many, ranks wait for each other more
# often than they hide traffic, but messages are small.
_NUM_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass
class BucketDraft:
    """A bucket that is being filled.

    Args:
        matrices: What is in it.
        load_s: Newton-Schulz seconds by rank.
        spread_s: Seconds in which replicas pass results on, by the first of those that hold the
            same. A rank has the same replicas in all matrices.
    """

    matrices: list[TravellingMatrix] = field(default_factory=list)
    load_s: dict[int, float] = field(default_factory=dict)
    spread_s: dict[int, float] = field(default_factory=dict)

    def load_of(self, owners: Sequence[int]) -> float:
        """Return the load of the busiest of some ranks."""
        return max([self.load_s.get(owner, 0.0) for owner in owners])

    def spread_of(self, holders: Sequence[int]) -> float:
        """Return the seconds of the slowest of some replicas, given the first of each."""
        return max([self.spread_s.get(first, 0.0) for first in holders], default=0.0)

    def add(self, matrix: TravellingMatrix) -> None:
        """Put a matrix in."""
        self.matrices.append(matrix)
        for owner in matrix.owners:
            self.load_s[owner] = self.load_s.get(owner, 0.0) + matrix.load_s
        for holders, seconds in matrix.spread_s.items():
            self.spread_s[holders[0]] = self.spread_s.get(holders[0], 0.0) + seconds

    def seconds(self) -> BucketSeconds:
        """Add up what its matrices take on each rank."""
        gather_s: dict[int, float] = defaultdict(float)
        scatter_s: dict[int, float] = defaultdict(float)
        edge_s: dict[int, float] = defaultdict(float)
        sum_s: dict[int, float] = defaultdict(float)
        spread_s: dict[tuple[int, ...], float] = defaultdict(float)
        # In parameter order: sums of floats depend on it, and plans are compared across versions.
        for matrix in sorted(self.matrices, key=lambda matrix: matrix.index):
            for owner in matrix.owners:
                gather_s[owner] += matrix.gather_s[owner]
                scatter_s[owner] += matrix.scatter_s[owner]
                edge_s[owner] += matrix.edge_s
                sum_s[owner] += matrix.sum_s
            for holders, seconds in matrix.spread_s.items():
                spread_s[holders] += seconds
        spread_by_rank: dict[int, float] = {
            rank: seconds for holders, seconds in spread_s.items() for rank in holders
        }
        return BucketSeconds(
            self.load_s, dict(gather_s), dict(scatter_s), spread_by_rank, dict(edge_s), dict(sum_s)
        )

    @property
    def busiest_link_s(self) -> float:
        """Seconds of rows and results over the busiest link."""
        link_s: dict[int, float] = defaultdict(float)
        for matrix in self.matrices:
            for owner in matrix.owners:
                link_s[owner] += matrix.gather_s[owner] + matrix.scatter_s[owner]
        return max(link_s.values())


def deal(
    matrices: Sequence[TravellingMatrix], *, has_replicas: bool
) -> Iterator[list[BucketDraft]]:
    """Yield all matrices in buckets: in several numbers of them, ascending, and in several orders.

    Args:
        matrices: Those of which rows travel.
        has_replicas: Whether several ranks hold the same rows.
    """
    # Longest first: the short ones then even out what the long ones left uneven.
    longest_first = sorted(matrices, key=lambda matrix: (-matrix.load_s, matrix.index))
    num_used = 0
    for num_buckets in _NUM_BUCKETS:
        drafts = _dealt(longest_first, num_buckets)
        # No owner has a matrix for one more.
        if len(drafts) <= num_used:
            return
        num_used = len(drafts)
        if len(drafts) == 1:
            yield drafts
        elif not has_replicas:
            yield _lightest_outside(drafts)
        else:
            # Neither is the better one for all plans of docs/performance.md.
            longest, second, *others = drafts
            yield [longest, *others, second]
            yield _dealt(longest_first, num_buckets, evens_spread=True)[::-1]


def _dealt(
    longest_first: Sequence[TravellingMatrix], num_buckets: int, *, evens_spread: bool = False
) -> list[BucketDraft]:
    """Put each matrix where its owners have least to do; the first buckets have the longest ones.

    Args:
        longest_first: The matrices, in the order in which they are dealt out.
        num_buckets: So many buckets; fewer are returned where there are not as many matrices.
        evens_spread: Whether, of buckets in which its owners have equally much to do, that is taken
            in which its replicas pass least on. A shard may have matrices of one shape alone:
            without this all of it would be passed on in one bucket. Llama-3-8B on 32 ranks in 4
            instances: 53 in place of 71 ms.
    """
    drafts = [BucketDraft() for _ in range(num_buckets)]
    for matrix in longest_first:
        loads = [draft.load_of(matrix.owners) for draft in drafts]
        least = min(loads)
        # The first of equal ones, so that every rank finds the same.
        equal = [draft for draft, load in zip(drafts, loads, strict=True) if load == least]
        if evens_spread:
            holders = [each[0] for each in matrix.spread_s]
            min(equal, key=lambda draft: draft.spread_of(holders)).add(matrix)
        else:
            equal[0].add(matrix)
    return [draft for draft in drafts if draft.matrices]


def _lightest_outside(drafts: Sequence[BucketDraft]) -> list[BucketDraft]:
    """Return buckets with those of the least traffic first and last, the least of all last.

    Nothing hides the gather of the first bucket and the scatter of the last one. Predicted step of
    Llama-3-70B on 64 ranks: 433 ms so, 482 with the longest matrices first. Of Qwen3-235B on 2,048
    ranks: 19.9 ms so, 21.1 with the shortest matrices at both ends, of which a rank has four where
    others have one long one of half the traffic.
    """
    # To the nanosecond: without that the last bits of sums would decide. Of equal ones those with
    # the shortest matrices.
    lightest_first = sorted(reversed(drafts), key=lambda each: round(each.busiest_link_s * 1e9))
    last, first = lightest_first[:2]
    others = [draft for draft in drafts if draft is not first and draft is not last]
    return [first, *others, last]
