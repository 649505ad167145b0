# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that a step stages in: which buffer is alive when, and where it lies in one arena.

Buffers that are not alive at the same moment of a step, see :mod:`megatron_muon.plan.schedule`, may
lie in the same place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.schedule import Depth, Round, rounds_of
from megatron_muon.plan.wire import Wire

_MOMENTS = 5  # of a round
_NUM_TRIES = 4  # from each order; more gain nothing on the plans of docs/performance.md
_BEFORE = -1  # the moment in which the first gathers start
# Source: CUDA's allocations are aligned to 256 bytes. Kernels that read 16 bytes at once, and
# cuBLAS's fast ones, need less.
_ALIGNMENT = 256


class BucketSizes(NamedTuple):
    """What one rank stages for a bucket, in elements or in bytes; or the first byte of each.

    Args:
        gather_send: Rows for other owners.
        gather_receive: Rows from other ranks.
        stacks: What it owns, padding included.
        scatter_send: Results for other holders.
        scatter_receive: Results from other owners.
    """

    gather_send: int
    gather_receive: int
    stacks: int
    scatter_send: int
    scatter_receive: int

    def in_bytes(self, wire: Wire) -> "BucketSizes":
        """Convert elements to bytes."""
        gather, scatter = wire.gather_bytes, wire.scatter_bytes
        each = (gather, gather, gather, scatter, scatter)
        return BucketSizes(*(size * width for size, width in zip(self, each, strict=True)))


class _Lifetime(NamedTuple):
    """First and last moment of a buffer, both included, counted over all rounds."""

    first: int
    last: int

    def overlaps(self, other: "_Lifetime") -> bool:
        """Return whether both are alive at some moment."""
        return self.first <= other.last and other.first <= self.last


class PlanStaging(NamedTuple):
    """What one rank stages for one of its plans.

    Args:
        buckets: Bytes of the buffers of each bucket.
        local_bytes: Bytes of the largest stack of local matrices.
        depth: How many buckets are under way.
    """

    buckets: Sequence[BucketSizes]
    local_bytes: int
    depth: Depth


@dataclass(frozen=True)
class StagingLayout:
    """Places of all buffers of one rank in one arena.

    Args:
        buckets: First byte of each buffer, for each bucket of each plan.
        local: First byte of the stack of local matrices, for each round and for the end. Stacks of
            a round share it: they are orthogonalized one after the other.
        num_bytes: Size of the arena: the most that is alive at one moment, and what buffers of
            different sizes leave unused between them.
    """

    buckets: tuple[tuple[BucketSizes, ...], ...]
    local: tuple[int, ...]
    num_bytes: int

    @classmethod
    def build(cls, plans: Sequence[PlanStaging]) -> "StagingLayout":
        """Place the buffers.

        Args:
            plans: What the rank stages for each of its plans.
        """
        rounds = rounds_of([len(plan.buckets) for plan in plans])
        position = {turn: number for number, turn in enumerate(rounds)}
        buckets = [
            (number, bucket, plan)
            for number, plan in enumerate(plans)
            for bucket in range(len(plan.buckets))
        ]
        sizes = [size for _, bucket, plan in buckets for size in plan.buckets[bucket]]
        lifetimes = [
            each
            for number, bucket, plan in buckets
            for each in _lifetimes(Round(number, bucket), position, plan.depth)
        ]
        # Local matrices may be due in any round, and at the end.
        num_turns = len(rounds) + 1
        sizes += [max((plan.local_bytes for plan in plans), default=0)] * num_turns
        lifetimes += [_Lifetime(_MOMENTS * i, _MOMENTS * i) for i in range(num_turns)]
        offsets, num_bytes = _place(sizes, lifetimes)
        width = len(BucketSizes._fields)
        places = iter(
            BucketSizes(*offsets[width * index : width * (index + 1)])
            for index in range(len(buckets))
        )
        return cls(
            tuple(tuple(next(places) for _ in plan.buckets) for plan in plans),
            tuple(offsets[width * len(buckets) :]),
            num_bytes,
        )


def _lifetimes(turn: Round, position: Mapping[Round, int], depth: Depth) -> list[_Lifetime]:
    """Return when the buffers of a bucket are alive, in the order of :class:`BucketSizes`.

    Args:
        turn: Of the bucket.
        position: Position of each turn among the rounds.
        depth: Of its plan.
    """
    now = _MOMENTS * position[turn]
    starting = Round(turn.plan, turn.bucket - depth.ahead)
    packed = _MOMENTS * position[starting] + 1 if starting in position else _BEFORE
    finishing = Round(turn.plan, turn.bucket + depth.behind)
    # What is waited for after the last round outlives the local matrices there.
    scattered = _MOMENTS * position.get(finishing, len(position)) + 3
    return [
        # Its gather is waited for before the next one is packed, in moment 1.
        _Lifetime(packed, now),
        _Lifetime(packed, now + 2),
        # Newton-Schulz writes its first step elsewhere; upstream refuses to take none.
        _Lifetime(now + 2, now + 2),
        _Lifetime(now + 4, scattered),
        _Lifetime(now + 4, scattered),
    ]


def _place(sizes: Sequence[int], lifetimes: Sequence[_Lifetime]) -> tuple[list[int], int]:
    """Place buffers of known lifetimes, in the best of several orders, each as low as it fits.

    The best placement is NP-hard. No order is the best for all plans of docs/performance.md. What
    ends highest in one order is placed first in the next try: that comes to what is alive at once
    for a rank of Llama-70B on 64 where the orders alone take 4.8 GB instead of 4.1.
    """
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    # A rank takes part in few buckets: most buffers are empty, and lie anywhere.
    used = [index for index, size in enumerate(aligned) if size]
    beside = {
        index: [other for other in used if lifetimes[index].overlaps(lifetimes[other])]
        for index in used
    }
    # What is alive only grows where a lifetime begins.
    busiest = max(
        (
            sum(
                aligned[other]
                for other in beside[index]
                if lifetimes[other].first <= lifetimes[index].first
            )
            for index in used
        ),
        default=0,
    )
    best: tuple[list[int], int] = [], 0
    for rule in _ORDERS:
        order = sorted(used, key=lambda index: rule(aligned[index], lifetimes[index]))
        for _ in range(_NUM_TRIES):
            offsets, end = _place_in_order(aligned, beside, order)
            if not best[0] or end < best[1]:
                best = offsets, end
            if end == busiest:
                return best
            highest = next(index for index in order if offsets[index] + aligned[index] == end)
            order = [highest, *(index for index in order if index != highest)]
    return best


# Largest first; largest and longest alive first; first come; first gone.
_ORDERS: tuple[Callable[[int, _Lifetime], tuple[int, ...]], ...] = (
    lambda size, alive: (-size, alive.first),
    lambda size, alive: (-size * (1 + alive.last - alive.first), alive.first),
    lambda size, alive: (alive.first, -alive.last),
    lambda size, alive: (alive.first, -size),
    lambda size, alive: (alive.last, -size),
)


def _place_in_order(
    sizes: Sequence[int], beside: Mapping[int, Sequence[int]], order: Sequence[int]
) -> tuple[list[int], int]:
    """Place each buffer at the lowest gap between those that are placed and alive beside it."""
    offsets = [0] * len(sizes)
    placed: set[int] = set()
    end = 0
    for index in order:
        offset = 0
        for start, stop in sorted(
            (offsets[i], offsets[i] + sizes[i]) for i in beside[index] if i in placed
        ):
            if offset + sizes[index] <= start:
                break
            offset = max(offset, stop)
        offsets[index] = offset
        placed.add(index)
        end = max(end, offset + sizes[index])
    return offsets, end
