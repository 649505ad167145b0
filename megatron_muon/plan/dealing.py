# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Deal matrices out to buckets, and put the buckets in order.

Buckets are slices of time: what a rank owns is dealt out longest first, so that each bucket holds
about the same share of its time.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in each bucket most ranks would wait for the few that own some
(:mod:`megatron_muon.plan.step_estimate`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_muon.plan.assignment import BUSY_LOAD
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
        num_alike: Matrices that lie alike, see :attr:`TravellingMatrix.lie`.
    """

    matrices: list[TravellingMatrix] = field(default_factory=list)
    load_s: dict[int, float] = field(default_factory=dict)
    num_alike: Counter[Hashable] = field(default_factory=Counter)

    def load_of(self, owners: Sequence[int]) -> float:
        """Return the load of the busiest of some ranks."""
        return max([self.load_s.get(owner, 0.0) for owner in owners])

    def add(self, matrix: TravellingMatrix) -> None:
        """Put a matrix in."""
        self.matrices.append(matrix)
        self.num_alike[matrix.lie] += 1
        for owner in matrix.owners:
            self.load_s[owner] = self.load_s.get(owner, 0.0) + matrix.load_s


def deal(matrices: Sequence[TravellingMatrix]) -> Iterator[list[BucketDraft]]:
    """Yield all matrices in buckets: in several numbers of them, ascending, in up to three ways.

    No way is the best one for all plans of docs/performance.md. Nothing hides the gather of the
    first bucket and the scatter of the last one.

    Args:
        matrices: Those of which rows travel.
    """
    # Longest first: the short ones then even out what the long ones left uneven.
    longest_first = sorted(matrices, key=lambda matrix: (-matrix.load_s, matrix.index))
    num_used = 0
    for num_buckets in _NUM_BUCKETS:
        by_length = _dealt(longest_first, num_buckets)
        # No owner has a matrix for one more.
        if len(by_length) <= num_used:
            return
        num_used = len(by_length)
        if num_used == 1:
            yield by_length
            continue
        yield _second_last(by_length)
        # The shortest first, so that work starts early.
        yield _dealt(longest_first, num_buckets, is_mixed=True)[::-1]
        if num_used > 2:
            yield _second_last(_dealt(longest_first, num_buckets, spares_outside=True))


def _dealt(
    longest_first: Sequence[TravellingMatrix],
    num_buckets: int,
    *,
    is_mixed: bool = False,
    spares_outside: bool = False,
) -> list[BucketDraft]:
    """Put each matrix where its owners have least to do; the first buckets have the longest ones.

    Args:
        longest_first: The matrices, in the order in which they are dealt out.
        num_buckets: So many buckets; fewer are returned where there are not as many matrices.
        is_mixed: Whether, of buckets in which its owners have equally much to do, that is taken
            which has fewest that lie alike. Otherwise all of a shape may be in one bucket. The few
            ranks that hold them then send all that it gathers, and pass on all its results where
            they have replicas. Llama-3-8B on 32 ranks in 4 instances: 53 in place of 71 ms.
        spares_outside: Whether the longest matrices of ranks that are not busy come in other
            buckets than the first two, which are to be the first and the last one. Nothing hides
            what these gather and scatter, and holders send it faster if it is for busy ranks
            alone. Llama-3-70B on 64 ranks, with 8 tensor-parallel ranks: 53.7 in place of 55.0 ms.
    """
    drafts = [BucketDraft() for _ in range(num_buckets)]
    inner_first = [*drafts[2:], *drafts[:2]]
    busy = _busy_ranks(longest_first) if spares_outside else set()
    for matrix in longest_first:
        can_wait = spares_outside and busy.isdisjoint(matrix.owners)
        candidates = inner_first if can_wait else drafts
        loads = [draft.load_of(matrix.owners) for draft in candidates]
        least = min(loads)
        # The first of equal ones, so that every rank finds the same.
        equal = [draft for draft, load in zip(candidates, loads, strict=True) if load == least]
        if is_mixed:
            min(equal, key=lambda draft: draft.num_alike[matrix.lie]).add(matrix)
        else:
            equal[0].add(matrix)
    return [draft for draft in drafts if draft.matrices]


def _busy_ranks(matrices: Sequence[TravellingMatrix]) -> set[int]:
    """Return the ranks whose matrices take nearly as long as those of the busiest one."""
    all_in_one = BucketDraft()
    for matrix in matrices:
        all_in_one.add(matrix)
    longest_s = max(all_in_one.load_s.values())
    return {rank for rank, load in all_in_one.load_s.items() if load >= BUSY_LOAD * longest_s}


def _second_last(drafts: Sequence[BucketDraft]) -> list[BucketDraft]:
    """Return buckets with the second one last: the two with the longest matrices are outside."""
    first, second, *others = drafts
    return [first, *others, second]
