# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that buckets would take, before there is a plan."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.dealing import BucketDraft
from megatron_muon.plan.schedule import PlanOrder
from megatron_muon.plan.stacking import MAX_PADDING, Stacking
from megatron_muon.plan.staging import (
    BucketSizes,
    PlanStaging,
    ScatterSizes,
    StagingLayout,
    aligned_size,
    most_alive,
)
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire

# Ranks whose memory is looked at first: those that hold and own most. And those that are added at
# once: each adds to the time of every choice.
_NUM_AT_ONCE = 16
# What gaps between buffers add to what is alive at once. The most on a rank of the plans of
# docs/performance.md is 1.11, of both kinds of DeepSeek-V3 on 64 ranks.
GAPS = 1.15


class _Bucket(NamedTuple):
    """What one rank stages of a bucket, in elements.

    Args:
        sizes: Buffers of its gathers, and stacks.
        scattered: Buffers of all its scatters together.
        excess: What the largest portion of results may have beyond an equal share.
    """

    sizes: BucketSizes
    scattered: ScatterSizes
    excess: ScatterSizes


class _Rank(NamedTuple):
    """What one rank stages.

    Args:
        buckets: Of each bucket.
        local_bytes: Bytes of its largest local stack.
    """

    buckets: tuple[_Bucket, ...]
    local_bytes: int

    def staging(self, order: PlanOrder, wire: Wire) -> PlanStaging:
        """Return what it stages in an order."""
        scatters = []
        for bucket in self.buckets:
            largest = ScatterSizes(
                *(
                    min(size, -(-size // order.num_scatters) + excess)
                    for size, excess in zip(bucket.scattered, bucket.excess, strict=True)
                )
            )
            scatters += [largest.in_bytes(wire)] * order.num_scatters
        return PlanStaging(
            order,
            [bucket.sizes.in_bytes(wire) for bucket in self.buckets],
            scatters,
            self.local_bytes,
        )


@dataclass(frozen=True)
class BucketMemory:
    """Memory of some buckets.

    Args:
        ranks: What ranks stage, many of which stage the same.
        local_bytes: Bytes of the largest local stack of any rank.
        wire: What travels.
    """

    ranks: Set[_Rank]
    local_bytes: int
    wire: Wire

    def needed_bytes(self, order: PlanOrder, staging_bytes: int = 0) -> int:
        """Return the bytes that the fullest rank stages, and some room.

        Args:
            order: What decides the order of a step.
            staging_bytes: Where it is not clear whether they fit into it, the bytes are exact.
        """
        alive = self.most_alive(order)
        if alive <= staging_bytes < alive * GAPS:
            return self.placed_bytes(order)
        return math.ceil(alive * GAPS)

    def most_alive(self, order: PlanOrder, staging_bytes: float = math.inf) -> int:
        """Return the most bytes alive at once on a rank, or what exceeds a number."""
        # A rank may have nothing but local matrices.
        most = self.local_bytes
        for rank in self.ranks:
            if most > staging_bytes:
                break
            most = max(most, most_alive([rank.staging(order, self.wire)]))
        return most

    def placed_bytes(self, order: PlanOrder) -> int:
        """Return the bytes that the fullest rank stages, gaps included."""
        layouts = (StagingLayout.build([rank.staging(order, self.wire)]) for rank in self.ranks)
        return max([layout.num_bytes for layout in layouts] + [self.local_bytes])


class FullestRanks:
    """The ranks that stage most: of thousands of ranks a few are looked at in each choice.

    Which rank is the fullest depends on which buckets are under way together. So the memory of all
    ranks is compared once buckets are chosen (:meth:`look_at_fuller`). Ranks that take more are
    looked at as well, and buckets are chosen again.

    Args:
        travelling: Matrices of which rows travel.
        local: Indices of the local matrices.
        stacking: Sizes of stacks; with the wire.
    """

    def __init__(
        self, travelling: Sequence[TravellingMatrix], local: Sequence[int], stacking: Stacking
    ) -> None:
        self._stacking = stacking
        width = stacking.wire.gather_bytes
        self._local_bytes_by_rank = {
            rank: aligned_size(width * max(sizes))
            for rank, sizes in stacking.elements(local).items()
        }
        total: Counter[int] = Counter()
        for matrix in travelling:
            total.update(matrix.layout.elements_by_rank)
            total.update(dict.fromkeys(matrix.owners, matrix.part_elements))
        for rank, num_bytes in self._local_bytes_by_rank.items():
            total[rank] += num_bytes // width
        self._total = total  # elements that a rank holds or owns
        ranks = sorted(total, key=lambda rank: (-total[rank], rank))
        self._ranks, self._others = ranks[:_NUM_AT_ONCE], ranks[_NUM_AT_ONCE:]

    @property
    def local_bytes(self) -> int:
        """Bytes of the largest local stack of any rank."""
        return max(self._local_bytes_by_rank.values(), default=0)

    def memory_of(self, drafts: Sequence[BucketDraft], *, is_portioned: bool) -> BucketMemory:
        """Return what buckets take on the ranks that are looked at."""
        ranks = self._staged(drafts, self._ranks, is_portioned=is_portioned)
        return BucketMemory(set(ranks.values()), self.local_bytes, self._stacking.wire)

    def look_at_fuller(
        self, num_bytes: int, drafts: Sequence[BucketDraft], order: PlanOrder
    ) -> int:
        """Look at the fullest ranks on which buckets take more than some bytes.

        Args:
            num_bytes: What they may take.
            drafts: The buckets.
            order: What decides the order of a step.

        Returns:
            The most that a rank takes which was not looked at; 0 where all surely take less.
        """
        if self._most_of_others(order) <= num_bytes:
            return 0
        others = self._staged(drafts, self._others, is_portioned=order.is_portioned)
        needed = {
            rank: BucketMemory({rank}, 0, self._stacking.wire).needed_bytes(order, num_bytes)
            for rank in set(others.values())
        }
        by_rank = {number: needed[rank] for number, rank in others.items()}
        fullest = sorted(others, key=lambda number: (-by_rank[number], number))
        # A few at a time: often others take less once buckets fit on these.
        fuller = [number for number in fullest[:_NUM_AT_ONCE] if by_rank[number] > num_bytes]
        self._ranks = self._ranks + fuller
        self._others = [rank for rank in self._others if rank not in fuller]
        return max(by_rank.values(), default=0)

    def _most_of_others(self, order: PlanOrder) -> float:
        """Return what a rank that is not looked at could take if no buffers shared memory."""
        most = max((self._total[rank] for rank in self._others), default=0)
        wire = self._stacking.wire
        # Of portions of results the largest one may have all.
        scatter_bytes = wire.scatter_bytes * (order.num_scatters if order.is_portioned else 1)
        # Rows travel there and back, and are copied to stacks, which are padded.
        num_bytes = most * (wire.gather_bytes * (1 + MAX_PADDING) + scatter_bytes)
        num_buffers = order.num_buckets * (len(BucketSizes._fields) + 2 * order.num_scatters)
        return num_bytes + num_buffers * aligned_size(1)

    def _staged(
        self, drafts: Sequence[BucketDraft], ranks: Sequence[int], *, is_portioned: bool
    ) -> dict[int, _Rank]:
        """Return what some ranks stage."""
        indices = [[matrix.index for matrix in draft.matrices] for draft in drafts]
        stacks = [self._stacking.elements(each) for each in indices]
        in_place = [
            self._stacking.arriving_in_place(each, is_portioned=is_portioned) for each in indices
        ]
        return {
            rank: _Rank(
                tuple(
                    _staged(draft, of_bucket, owners, rank, is_portioned=is_portioned)
                    for draft, of_bucket, owners in zip(drafts, stacks, in_place, strict=True)
                ),
                self._local_bytes_by_rank.get(rank, 0),
            )
            for rank in ranks
        }


def _staged(
    draft: BucketDraft,
    stacks: Mapping[int, Sequence[int]],
    in_place: Set[int],
    rank: int,
    *,
    is_portioned: bool,
) -> _Bucket:
    """Return what a rank stages of a bucket.

    Args:
        draft: The bucket.
        stacks: Elements of the stacks of each owner.
        in_place: Owners whose rows arrive in the stack.
        rank: The rank.
        is_portioned: Whether the bucket is portioned.
    """
    # Of thousands of ranks a matrix lies on a few.
    matrices = [
        matrix
        for matrix in draft.matrices
        if rank in matrix.layout.elements_by_rank or rank in matrix.owners
    ]
    sent, received, *scattered = _total([matrix.sizes(rank) for matrix in matrices], 4)
    sizes = BucketSizes(sent, received, sum(stacks.get(rank, ())))
    # Where no rows come from others, they are read to the stack.
    is_in_place = received > 0 and rank in in_place
    excess: tuple[int, ...] = (0, 0)
    if is_portioned:
        excess = _total([matrix.portion_excess(rank) for matrix in matrices], 2)
    return _Bucket(
        sizes.in_place if is_in_place else sizes, ScatterSizes(*scattered), ScatterSizes(*excess)
    )


def _total(sizes: Sequence[tuple[int, ...]], num_kinds: int) -> tuple[int, ...]:
    """Add up sizes, each with those of its kind."""
    return tuple(map(sum, zip(*sizes, strict=True))) if sizes else (0,) * num_kinds
