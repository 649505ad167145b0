# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices travel together.

Buckets are slices of time: what a rank owns is dealt out longest first, so that each bucket holds
about the same share of its time. Of the numbers of buckets whose messages fit into memory the one
with the shortest estimated step is taken. As much of it is under way as memory allows and the step
gains by.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in each bucket most ranks would wait for the few that own some
(:mod:`megatron_muon.plan.step_estimate`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.schedule import Depth, PlanOrder
from megatron_muon.plan.stacking import Stacking
from megatron_muon.plan.staging import (
    BucketSizes,
    PlanStaging,
    ScatterSizes,
    StagingLayout,
    aligned_size,
    most_alive,
)
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds, step_seconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire

# Numbers of buckets to try. One bucket overlaps nothing; with many, ranks wait for each other more
# often than they hide traffic, but messages are small.
_NUM_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
# Scatters of a bucket to try where shards have replicas: each has to hold what all owners send it.
_NUM_SCATTERS = (1, 2, 4, 8, 16, 32, 64)
# Portions of a portioned bucket to try. With 8 the first product, a tenth of Newton-Schulz for most
# shapes, leaves an eightieth of it to take when the last rows have arrived.
_NUM_PORTIONS = (2, 4, 8)
# Portions take more launches and collectives, which the estimate counts in part. They have to
# shorten the step to this share. On gloo ranks 6 % were measured where 8 % were predicted, and
# nothing where 4 % were (docs/performance.md).
_WORTH_PORTIONS = 0.96
# Twice as many scatters are tried while they shorten the step by so much.
_WORTH_SCATTERS = 0.99
# No more buckets are tried when the step is so near to what no schedule can beat.
_NEAR_BOUND = 1.002
# Depths to try. The deeper, the less a rank waits for others; the last one takes the least memory.
_DEPTHS = (*(Depth(each, each) for each in (16, 8, 4, 2)), Depth(1, 2), Depth(2, 1), Depth(1, 1))
# Memory is given back where the step is estimated to take at most so many times as long. Not below
# this depth, though: the estimate knows of no rank that is late by chance.
_WORTH_DEPTH = 1.005
_LEAST_FREE_DEPTH = 2
# Ranks whose memory is looked at: those with most to stage over all buckets.
_NUM_FULLEST = 16
# What gaps between buffers add to what is alive at once. The most on a rank of the plans of
# docs/performance.md is 1.11, of both kinds of DeepSeek-V3 on 64 ranks.
_GAPS = 1.15
# Where nothing fits and nothing is refused, plans may take so many times the least: with the least
# itself nothing overlaps.
_ROOM = 1.1


@dataclass
class _BucketDraft:
    """A bucket that is being filled."""

    matrices: list[TravellingMatrix] = field(default_factory=list)
    load_s: dict[int, float] = field(default_factory=dict)  # by rank

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


class _Dealt(NamedTuple):
    """All matrices, dealt out to buckets.

    Args:
        drafts: The buckets.
        is_portioned: Whether they are portioned.
        staged: Elements of each bucket, in the order of the fields of the two sizes, and what the
            largest portion of results may have beyond an equal share; and bytes of the largest
            local stack; of the fullest ranks, many of which have equal ones.
    """

    drafts: Sequence[_BucketDraft]
    is_portioned: bool
    staged: Set[tuple[tuple[tuple[int, ...], ...], int]]


@dataclass(frozen=True)
class Buckets:
    """The buckets of a plan.

    Args:
        matrices: Indices of the matrices of each bucket, ascending.
        seconds: What each takes.
        order: What of them decides the order of a step.
        step_s: Estimated seconds of a step.
        staging_bytes: Memory that they take on the fullest rank, and some room.
    """

    matrices: list[list[int]]
    seconds: tuple[BucketSeconds, ...]
    order: PlanOrder
    step_s: float
    staging_bytes: int


def _nanoseconds(seconds: float) -> int:
    """Round a difference: without that the last bits of sums would decide."""
    return round(seconds * 1e9)


def _free_depth(buckets: Buckets) -> int:
    """Return how much is under way, up to what is never given back."""
    return min(_LEAST_FREE_DEPTH, *buckets.order.depth)


@dataclass(frozen=True)
class BucketChooser:
    """Deal matrices out to buckets.

    Args:
        travelling: Matrices of which rows travel.
        local: Indices of the local matrices.
        ranks: Ranks of the domain.
        local_load_s: Newton-Schulz seconds by rank of what needs no other rank.
        stacking: Sizes of stacks; with the cost model and the wire.
        may_portion: Whether buckets may be portioned, see :mod:`megatron_muon.plan.portions`.
    """

    travelling: Sequence[TravellingMatrix]
    local: Sequence[int]
    ranks: Sequence[int]
    local_load_s: Mapping[int, float]
    stacking: Stacking
    may_portion: bool = False

    def choose(self, staging_bytes: int, *, is_limit: bool) -> Buckets:
        """Return the buckets with the shortest step that fit.

        Where none do: those that take the least memory, or little more where it is no limit.

        Args:
            staging_bytes: Memory of a rank.
            is_limit: Whether more is refused by the caller.
        """
        if not self.travelling:
            most = max(self._local_bytes.values(), default=0)
            return Buckets([], (), PlanOrder(0, 1, Depth(1, 1), False), self.bound_s, most)
        found, too_large = self._find(staging_bytes, is_portioned=False)
        if found is None and not is_limit:
            # Portions have no say: they take more memory, and are for a shorter step.
            needed = min(needed for needed, _, _ in too_large)
            return self.choose(math.ceil(_ROOM * needed), is_limit=True)
        # Where the bound is near there is nothing to gain.
        if found is None or self.bound_s <= _WORTH_PORTIONS * found.step_s:
            found, too_large_portions = self._with_portions(found, staging_bytes)
            too_large += too_large_portions
        if found is not None:
            return found
        needed, dealt, order = min(too_large, key=lambda each: each[0])
        return self._estimate(dealt, order, self._placed_bytes(dealt, order))

    def _with_portions(
        self, whole: Buckets | None, staging_bytes: int
    ) -> tuple[Buckets | None, list[tuple[int, _Dealt, PlanOrder]]]:
        """Return portioned buckets where they are worth it, and what does not fit of them.

        Args:
            whole: The best buckets without portions; None where none fit.
            staging_bytes: Memory of a rank.
        """
        if not self._takes_portions:
            return whole, []
        found, too_large = self._find(staging_bytes, is_portioned=True)
        if found is None or (whole is not None and found.step_s > _WORTH_PORTIONS * whole.step_s):
            return whole, too_large
        return found, too_large

    def _find(
        self, staging_bytes: int, *, is_portioned: bool
    ) -> tuple[Buckets | None, list[tuple[int, _Dealt, PlanOrder]]]:
        """Return the buckets with the shortest step, and bytes and order of those that do not fit.

        Args:
            staging_bytes: Memory of a rank.
            is_portioned: Whether buckets are portioned.
        """
        # Those with the shortest step so far, which is one unless several hide all traffic.
        best: list[tuple[Buckets, _Dealt]] = []
        too_large = []
        # Elsewhere all results of a bucket come back in one scatter.
        scatters = _NUM_SCATTERS if self.has_replicas else (1,)
        for dealt in self._deal(is_portioned=is_portioned):
            last_s = math.inf
            for num_scatters in _NUM_PORTIONS if is_portioned else scatters:
                order, needed = self._deepest(dealt, num_scatters, staging_bytes)
                if needed > staging_bytes:
                    too_large.append((needed, dealt, order))
                    continue
                found = self._estimate(dealt, order, needed)
                gain_ns = _nanoseconds(best[0][0].step_s - found.step_s) if best else 1
                if gain_ns > 0:
                    best = []
                if gain_ns >= 0:
                    best.append((found, dealt))
                if found.step_s > _WORTH_SCATTERS * last_s:
                    break
                last_s = found.step_s
            # More buckets could only gain what is not worth the time of more estimates.
            bound_s = self.bound_s if is_portioned else self._whole_bound_s
            if best and best[0][0].step_s <= _NEAR_BOUND * bound_s:
                break
        leaner = [self._leaner(*each) for each in best]
        # A rank that is late by chance is waited for less with more under way.
        leanest = min(
            leaner, key=lambda each: (-_free_depth(each), each.staging_bytes), default=None
        )
        return leanest, too_large

    def _leaner(self, best: Buckets, dealt: _Dealt) -> Buckets:
        """Return buckets of which no more is under way than shortens the step."""
        for deepest in reversed([each for each in _DEPTHS if min(each) >= _LEAST_FREE_DEPTH]):
            order = self._order(dealt, best.order.num_scatters, deepest)
            needed = self._needed_bytes(dealt, order, 0)
            if needed >= best.staging_bytes:
                break
            found = self._estimate(dealt, order, needed)
            if found.step_s <= _WORTH_DEPTH * best.step_s:
                return found
        return best

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold the same rows."""
        return any(matrix.sent is not None for matrix in self.travelling)

    @property
    def _takes_portions(self) -> bool:
        """Whether portioned buckets are tried."""
        return self.may_portion

    @cached_property
    def bound_s(self) -> float:
        """Seconds that no schedule of these owners can beat."""
        return self._least_s(is_portioned=True) if self._takes_portions else self._whole_bound_s

    @cached_property
    def _whole_bound_s(self) -> float:
        """Seconds that no schedule without portions can beat."""
        return self._least_s(is_portioned=False)

    def _least_s(self, *, is_portioned: bool) -> float:
        """Return the seconds of a step without a wait that could be avoided.

        A rank works from when its first rows have arrived until it sends its last results. Only
        what needs no other rank can hide that. And links carry all that it owns, and all that it
        passes on.
        """
        work_s = dict.fromkeys(self.local_load_s, 0.0)
        shortest_s: dict[int, tuple[float, float]] = {}
        for matrix in self.travelling:
            for owner in matrix.owners:
                work_s[owner] += matrix.load_s
                gather_s, scatter_s = shortest_s.get(owner, (math.inf, math.inf))
                # The first product may hide as much of a gather, the last one of a scatter.
                edge_s = matrix.edge_s if is_portioned else 0.0
                shortest_s[owner] = (
                    min(gather_s, max(0.0, matrix.gather_s[owner] - edge_s)),
                    min(scatter_s, max(0.0, matrix.scatter_s[owner] - edge_s)),
                )
        work_s = {
            rank: seconds + max(self.local_load_s[rank], sum(shortest_s.get(rank, ())))
            for rank, seconds in work_s.items()
        }
        all_in_one = self._seconds(_BucketDraft(list(self.travelling)))
        return max(
            (
                max(
                    seconds,
                    all_in_one.gather_s.get(rank, 0.0) + all_in_one.scatter_s.get(rank, 0.0),
                    all_in_one.spread_s.get(rank, 0.0),
                )
                for rank, seconds in work_s.items()
            ),
            default=0.0,
        )

    def _seconds(self, draft: _BucketDraft) -> BucketSeconds:
        return draft.seconds(self.stacking.cost, self.stacking.wire)

    @cached_property
    def _local_bytes(self) -> dict[int, int]:
        """Return the bytes of the largest stack of local matrices, by rank."""
        width = self.stacking.wire.gather_bytes
        return {
            rank: aligned_size(width * max(sizes))
            for rank, sizes in self.stacking.elements(self.local).items()
        }

    @cached_property
    def _fullest_ranks(self) -> list[int]:
        """Return the ranks that stage most over all buckets, as owners and as holders."""
        total: Counter[int] = Counter()
        for matrix in self.travelling:
            total.update(matrix.layout.elements_by_rank)
            total.update(dict.fromkeys(matrix.owners, matrix.part_elements))
        for rank, num_bytes in self._local_bytes.items():
            total[rank] += num_bytes // self.stacking.wire.gather_bytes
        return sorted(total, key=lambda rank: (-total[rank], rank))[:_NUM_FULLEST]

    def _deal(self, *, is_portioned: bool) -> Iterator[_Dealt]:
        """Yield the matrices in several numbers of buckets, ascending."""
        # Longest first: the short ones then even out what the long ones left uneven.
        longest_first = sorted(self.travelling, key=lambda matrix: (-matrix.load_s, matrix.index))
        for num_buckets in _NUM_BUCKETS:
            drafts = [_BucketDraft() for _ in range(num_buckets)]
            for matrix in longest_first:
                # The first of equal ones, so that every rank finds the same.
                min(drafts, key=lambda draft: draft.load_of(matrix.owners)).add(matrix)
            for used in self._orders([draft for draft in drafts if draft.matrices]):
                yield self._dealt(used, is_portioned=is_portioned)
            if not drafts[-1].matrices:
                return

    def _orders(self, drafts: list[_BucketDraft]) -> Iterator[list[_BucketDraft]]:
        """Yield buckets, which come with the longest matrices first, in orders of a step to try.

        Nothing hides the gather of the first bucket and the scatter of the last one: they are the
        two with the shortest matrices. Predicted step of Llama-3-70B on 64 ranks: 445 ms so, 488
        with the longest first. With replicas a scatter ends when results have been passed on, which
        takes longest, so that short matrices, of which few ranks own some, are better early:
        shortest first, or between the two that are longest (70B on 256 ranks, 4 instances: 163 and
        174 ms; with tensor parallelism 8 on 64 ranks, 2 instances: 56 and 55).
        """
        if len(drafts) < 2:
            yield drafts
        elif self.has_replicas:
            yield drafts[::-1]
            longest, second, *others = drafts
            yield [longest, *others, second]
        else:
            *others, first, last = drafts
            yield [first, *others, last]

    def _dealt(self, drafts: Sequence[_BucketDraft], *, is_portioned: bool) -> _Dealt:
        indices = [[matrix.index for matrix in draft.matrices] for draft in drafts]
        stacks = [self.stacking.elements(each) for each in indices]
        in_place = [
            self.stacking.arriving_in_place(each, is_portioned=is_portioned) for each in indices
        ]
        staged = (
            self._staged(drafts, stacks, in_place, rank, is_portioned=is_portioned)
            for rank in self._fullest_ranks
        )
        return _Dealt(drafts, is_portioned, set(staged))

    def _staged(
        self,
        drafts: Sequence[_BucketDraft],
        all_stacks: Sequence[Mapping[int, Sequence[int]]],
        in_place: Sequence[Set[int]],
        rank: int,
        *,
        is_portioned: bool,
    ) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Return what a rank stages, as in :class:`_Dealt`."""
        elements = []
        for draft, stacks, owners in zip(drafts, all_stacks, in_place, strict=True):
            sent, received, *scattered = map(
                sum, zip(*(matrix.sizes(rank) for matrix in draft.matrices), strict=True)
            )
            sizes = BucketSizes(sent, received, sum(stacks.get(rank, ())))
            # Where no rows come from others, they are read to the stack.
            is_in_place = received > 0 and rank in owners
            excess = [0, 0]
            if is_portioned:
                excess = [
                    sum(of_each)
                    for of_each in zip(
                        *(matrix.portion_excess(rank) for matrix in draft.matrices), strict=True
                    )
                ]
            elements.append((*(sizes.in_place if is_in_place else sizes), *scattered, *excess))
        return tuple(elements), self._local_bytes.get(rank, 0)

    def _deepest(
        self, dealt: _Dealt, num_scatters: int, staging_bytes: int
    ) -> tuple[PlanOrder, int]:
        """Return the first depth that fits into memory, or the last one, and the bytes it takes."""
        for deepest in _DEPTHS:
            order = self._order(dealt, num_scatters, deepest)
            alive = self._most_alive(dealt, order, staging_bytes)
            # The last depth takes the least: of that alone the bytes matter if it does not fit.
            if alive > staging_bytes and deepest != _DEPTHS[-1]:
                continue
            needed = self._needed_bytes(dealt, order, staging_bytes)
            if needed <= staging_bytes:
                break
        return order, needed

    def _order(self, dealt: _Dealt, num_scatters: int, deepest: Depth) -> PlanOrder:
        """Return the order with a depth, or with all buckets under way if they are fewer."""
        count = len(dealt.drafts)
        depth = Depth(min(deepest.ahead, count), min(deepest.behind, count * num_scatters))
        return PlanOrder(count, num_scatters, depth, self.has_replicas, dealt.is_portioned)

    def _needed_bytes(self, dealt: _Dealt, order: PlanOrder, staging_bytes: int) -> int:
        """Return the bytes that the fullest of some ranks stages, and some room.

        Args:
            dealt: The buckets.
            order: What of them decides the order of a step.
            staging_bytes: Where it is not clear whether they fit into it, the bytes are exact.
        """
        alive = self._most_alive(dealt, order)
        if alive <= staging_bytes < alive * _GAPS:
            return self._placed_bytes(dealt, order)
        return math.ceil(alive * _GAPS)

    def _most_alive(self, dealt: _Dealt, order: PlanOrder, staging_bytes: float = math.inf) -> int:
        """Return the most bytes alive on one of the fullest ranks, or what exceeds a number."""
        # A rank may have nothing but local matrices.
        most = max(self._local_bytes.values(), default=0)
        for each in dealt.staged:
            if most > staging_bytes:
                break
            most = max(most, most_alive([self._staging(order, *each)]))
        return most

    def _placed_bytes(self, dealt: _Dealt, order: PlanOrder) -> int:
        """Return the bytes that the fullest of some ranks stages, gaps included."""
        layouts = (StagingLayout.build([self._staging(order, *each)]) for each in dealt.staged)
        return max([layout.num_bytes for layout in layouts] + list(self._local_bytes.values()))

    def _staging(
        self, order: PlanOrder, sizes: Sequence[Sequence[int]], local_bytes: int
    ) -> PlanStaging:
        """Return what a rank stages, from the elements of each bucket."""
        scatters = [
            ScatterSizes(
                *(
                    min(size, -(-size // order.num_scatters) + excess)
                    for size, excess in zip(of_bucket[3:5], of_bucket[5:], strict=True)
                )
            )
            for of_bucket in sizes
            for _ in range(order.num_scatters)
        ]
        return PlanStaging(
            order,
            [BucketSizes(*of_bucket[:3]).in_bytes(self.stacking.wire) for of_bucket in sizes],
            [each.in_bytes(self.stacking.wire) for each in scatters],
            local_bytes,
        )

    def _estimate(self, dealt: _Dealt, order: PlanOrder, staging_bytes: int) -> Buckets:
        seconds = tuple(map(self._seconds, dealt.drafts))
        latency_s = self.stacking.cost.latency_seconds(self.ranks)
        plan = PlanSeconds(self.ranks, seconds, order, latency_s)
        step_s = max(step_seconds([plan], self.local_load_s).values())
        indices = [sorted(matrix.index for matrix in draft.matrices) for draft in dealt.drafts]
        return Buckets(indices, seconds, order, step_s, staging_bytes)
