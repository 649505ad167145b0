# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices travel together.

Of the numbers of buckets whose messages fit into memory the one with the shortest estimated step is
taken. As much of it is under way as memory allows and the step gains by.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_muon.plan.bucket_memory import GAPS, BucketMemory, FullestRanks
from megatron_muon.plan.bucket_seconds import seconds_of
from megatron_muon.plan.dealing import BucketDraft, deal
from megatron_muon.plan.schedule import Depth, PlanOrder
from megatron_muon.plan.stacking import Stacking
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds, step_seconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix

# Scatters of a bucket to try where shards have replicas: each has to hold what all owners send it.
_NUM_SCATTERS = (1, 2, 4, 8, 16, 32, 64)
# Portions of a portioned bucket to try. With 8 the first product, a tenth of Newton-Schulz for most
# shapes, leaves an eightieth of it to take when the last rows have arrived.
_NUM_PORTIONS = (2, 4, 8)
# Portions take more launches and collectives, which the estimate counts in part. They have to
# shorten the step to this share. On gloo ranks 2 to 8 % were measured where 8 % were predicted, and
# between 3 % and a loss of 7 % where 4 to 5 % were (docs/performance.md).
_WORTH_PORTIONS = 0.94
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
# Where nothing fits and nothing is refused, plans may take so many times the least: with the least
# itself nothing overlaps.
_ROOM = 1.1


class _Dealt(NamedTuple):
    """All matrices, dealt out to buckets.

    Args:
        drafts: The buckets, in the order of a step.
        seconds: What each takes.
        is_portioned: Whether they are portioned.
        memory: What they take.
    """

    drafts: Sequence[BucketDraft]
    seconds: tuple[BucketSeconds, ...]
    is_portioned: bool
    memory: BucketMemory


@dataclass(frozen=True)
class Buckets:
    """The buckets of a plan.

    Args:
        drafts: The matrices of each.
        seconds: What each takes.
        order: What of them decides the order of a step.
        step_s: Estimated seconds of a step.
        staging_bytes: Memory that they take on the fullest rank, and some room.
    """

    drafts: Sequence[BucketDraft]
    seconds: tuple[BucketSeconds, ...]
    order: PlanOrder
    step_s: float
    staging_bytes: int

    @property
    def matrices(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the matrices of each bucket, ascending."""
        return tuple(
            tuple(sorted(matrix.index for matrix in draft.matrices)) for draft in self.drafts
        )


def _nanoseconds(seconds: float) -> int:
    """Round a difference: without that the last bits of sums would decide."""
    return round(seconds * 1e9)


def _free_depth(buckets: Buckets) -> int:
    """Return how much is under way, up to what is never given back."""
    return min(_LEAST_FREE_DEPTH, *buckets.order.depth)


@dataclass(frozen=True)
class BucketChooser:
    """Choose the buckets of a plan.

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

        Where none do: those that take the least memory, or little more where it is no limit. Chosen
        again while some rank takes more that was not looked at.

        Args:
            staging_bytes: Memory of a rank.
            is_limit: Whether more is refused by the caller.
        """
        if not self.travelling:
            nothing = PlanOrder(0, 1, Depth(1, 1), False)
            return Buckets([], (), nothing, self.bound_s, self._fullest.local_bytes)
        limit = staging_bytes
        while True:
            found = self._choose(limit, is_limit=is_limit)
            # Gaps between small buffers may be larger than the estimate has them.
            memory = self._fullest.memory_of(found.drafts, is_portioned=found.order.is_portioned)
            placed = memory.placed_bytes(found.order)
            if found.staging_bytes <= staging_bytes < placed:
                limit = min(limit, found.staging_bytes) - 1
                continue
            found = replace(found, staging_bytes=max(found.staging_bytes, placed))
            num_bytes = max(staging_bytes, found.staging_bytes)
            others = self._fullest.look_at_fuller(num_bytes, found.drafts, found.order)
            if others <= num_bytes:
                return replace(found, staging_bytes=max(found.staging_bytes, others))

    def _choose(self, staging_bytes: int, *, is_limit: bool) -> Buckets:
        """Choose by what is needed on the ranks that are looked at."""
        found, too_large = self._find(staging_bytes, is_portioned=False)
        if found is None and not is_limit:
            # Portions have no say: they take more memory, and are for a shorter step.
            needed = min(needed for needed, _, _ in too_large)
            return self._choose(math.ceil(_ROOM * needed), is_limit=True)
        # Where the bound is near there is nothing to gain.
        if found is None or self.bound_s <= _WORTH_PORTIONS * found.step_s:
            found, too_large_portions = self._with_portions(found, staging_bytes)
            too_large += too_large_portions
        if found is not None:
            return found
        return self._least(too_large)

    def _least(self, too_large: Sequence[tuple[int, _Dealt, PlanOrder]]) -> Buckets:
        """Return the buckets that take the least memory, exactly."""
        least = math.inf
        for needed, dealt, order in sorted(too_large, key=lambda each: each[0]):
            # Gaps can only add to what is alive: those that follow take more.
            if needed >= GAPS * least:
                break
            placed = dealt.memory.placed_bytes(order)
            if placed < least:
                least, found = placed, (dealt, order)
        return self._estimate(*found, int(least))

    def _with_portions(
        self, whole: Buckets | None, staging_bytes: int
    ) -> tuple[Buckets | None, list[tuple[int, _Dealt, PlanOrder]]]:
        """Return portioned buckets where they are worth it, and what does not fit of them.

        Args:
            whole: The best buckets without portions; None where none fit.
            staging_bytes: Memory of a rank.
        """
        if not self.may_portion:
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
                if best and _nanoseconds(best[0][0].step_s - found.step_s) == 0:
                    best.append((found, dealt))
                elif not best or self._is_worth(found, best[0][0]):
                    best = [(found, dealt)]
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

    def _is_worth(self, found: Buckets, best: Buckets) -> bool:
        """Return whether a step is so much shorter that it is worth its buckets.

        Each more has to gain the latency of a collective. The estimate hides that behind
        Newton-Schulz, but launches and copies take time of the rank. On 4 gloo ranks 32 small
        layers take 1.3 times as long in 16 buckets as in 2 (docs/performance.md).
        """
        gain_s = best.step_s - found.step_s
        # A rank that is late by chance is waited for less with more under way.
        if _free_depth(found) > _free_depth(best):
            return gain_s > 0
        return gain_s > (len(found.drafts) - len(best.drafts)) * self._latency_s

    def _leaner(self, best: Buckets, dealt: _Dealt) -> Buckets:
        """Return buckets of which no more is under way than shortens the step."""
        for deepest in reversed([each for each in _DEPTHS if min(each) >= _LEAST_FREE_DEPTH]):
            order = self._order(dealt, best.order.num_scatters, deepest)
            needed = dealt.memory.needed_bytes(order)
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

    @cached_property
    def bound_s(self) -> float:
        """Seconds that no schedule of these owners can beat."""
        return self._least_s(is_portioned=True) if self.may_portion else self._whole_bound_s

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
        all_in_one = self._seconds(self.travelling)
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

    @cached_property
    def _latency_s(self) -> float:
        """Seconds of a collective that carries nothing."""
        return self.stacking.cost.latency_seconds(self.ranks)

    @cached_property
    def _fullest(self) -> FullestRanks:
        return FullestRanks(self.travelling, self.local, self.stacking)

    def _deal(self, *, is_portioned: bool) -> Iterator[_Dealt]:
        """Yield the matrices in several numbers of buckets, ascending."""
        for drafts in deal(self.travelling):
            seconds = tuple(self._seconds(draft.matrices) for draft in drafts)
            memory = self._fullest.memory_of(drafts, is_portioned=is_portioned)
            yield _Dealt(drafts, seconds, is_portioned, memory)

    def _seconds(self, matrices: Sequence[TravellingMatrix]) -> BucketSeconds:
        return seconds_of(matrices, self.stacking.cost, self.stacking.wire)

    def _deepest(
        self, dealt: _Dealt, num_scatters: int, staging_bytes: int
    ) -> tuple[PlanOrder, int]:
        """Return the first depth that fits into memory, or the last one, and the bytes it takes."""
        # The last depth takes the least: where that does not fit, none does.
        least = self._order(dealt, num_scatters, _DEPTHS[-1])
        if dealt.memory.most_alive(least, staging_bytes) > staging_bytes:
            return least, dealt.memory.needed_bytes(least)
        for deepest in _DEPTHS:
            order = self._order(dealt, num_scatters, deepest)
            if dealt.memory.most_alive(order, staging_bytes) > staging_bytes:
                continue
            needed = dealt.memory.needed_bytes(order, staging_bytes)
            if needed <= staging_bytes:
                break
        return order, needed

    def _order(self, dealt: _Dealt, num_scatters: int, deepest: Depth) -> PlanOrder:
        """Return the order with a depth, or with all buckets under way if they are fewer."""
        count = len(dealt.drafts)
        depth = Depth(min(deepest.ahead, count), min(deepest.behind, count * num_scatters))
        return PlanOrder(count, num_scatters, depth, self.has_replicas, dealt.is_portioned)

    def _estimate(self, dealt: _Dealt, order: PlanOrder, staging_bytes: int) -> Buckets:
        plan = PlanSeconds(self.ranks, dealt.seconds, order, self._latency_s)
        step_s = max(step_seconds([plan], self.local_load_s).values())
        return Buckets(dealt.drafts, dealt.seconds, order, step_s, staging_bytes)
