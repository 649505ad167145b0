# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Deal matrices out to buckets, and put the buckets in order.

Buckets are slices of time: what a rank owns is dealt out longest first, so that each bucket holds
about the same share of its time.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in each bucket most ranks would wait for the few that own some
(:mod:`megatron_muon.plan.step_estimate`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.step_estimate import BucketSeconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire

# Numbers of buckets to try. One bucket overlaps nothing; with many, ranks wait for each other more
# often than they hide traffic, but messages are small.
_NUM_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


@dataclass
class BucketDraft:
    """A bucket that is being filled.

    Args:
        matrices: What is in it.
        load_s: Newton-Schulz seconds by rank.
    """

    matrices: list[TravellingMatrix] = field(default_factory=list)
    load_s: dict[int, float] = field(default_factory=dict)

    def load_of(self, owners: Sequence[int]) -> float:
        """Return the load of the busiest of some ranks."""
        return max([self.load_s.get(owner, 0.0) for owner in owners])

    def add(self, matrix: TravellingMatrix) -> None:
        """Put a matrix in."""
        self.matrices.append(matrix)
        for owner in matrix.owners:
            self.load_s[owner] = self.load_s.get(owner, 0.0) + matrix.load_s

    def seconds(self, cost: CostModel, wire: Wire) -> BucketSeconds:
        """Add up what its matrices take on each rank."""
        gather_s: dict[int, float] = defaultdict(float)
        scatter_s: dict[int, float] = defaultdict(float)
        edge_s: dict[int, float] = defaultdict(float)
        sum_s: dict[int, float] = defaultdict(float)
        spread: Counter[tuple[int, ...]] = Counter()  # elements by holders
        # In parameter order: sums of floats depend on it, and plans are compared across versions.
        for matrix in sorted(self.matrices, key=lambda matrix: matrix.index):
            for owner in matrix.owners:
                gather_s[owner] += matrix.gather_s[owner]
                scatter_s[owner] += matrix.scatter_s[owner]
                edge_s[owner] += matrix.edge_s
                sum_s[owner] += matrix.sum_s
            if matrix.sent is not None:
                for region in matrix.layout.regions:
                    spread[region.holders] += region.num_rows * region.num_cols
        spread_s = {
            rank: cost.all_gather_seconds(holders, elements * wire.scatter_bytes)
            for holders, elements in spread.items()
            for rank in holders
        }
        return BucketSeconds(
            self.load_s, dict(gather_s), dict(scatter_s), spread_s, dict(edge_s), dict(sum_s)
        )


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
    for num_buckets in _NUM_BUCKETS:
        drafts = [BucketDraft() for _ in range(num_buckets)]
        for matrix in longest_first:
            # The first of equal ones, so that every rank finds the same.
            min(drafts, key=lambda draft: draft.load_of(matrix.owners)).add(matrix)
        used = [draft for draft in drafts if draft.matrices]
        yield from _orders(used, has_replicas=has_replicas)
        if len(used) < num_buckets:
            return


def _orders(drafts: list[BucketDraft], *, has_replicas: bool) -> Iterator[list[BucketDraft]]:
    """Yield buckets, which come with the longest matrices first, in orders of a step to try.

    Nothing hides the gather of the first bucket and the scatter of the last one: they are the two
    with the shortest matrices. Predicted step of Llama-3-70B on 64 ranks: 433 ms so, 482 with the
    longest first. With replicas a scatter ends when results have been passed on, which takes
    longest, so that short matrices, of which few ranks own some, are better early: shortest first,
    or between the two that are longest (70B on 256 ranks, 4 instances: 163 and 174 ms; with tensor
    parallelism 8 on 64 ranks, 2 instances: 56 and 55).
    """
    if len(drafts) < 2:
        yield drafts
    elif has_replicas:
        yield drafts[::-1]
        longest, second, *others = drafts
        yield [longest, *others, second]
    else:
        *others, first, last = drafts
        yield [first, *others, last]
