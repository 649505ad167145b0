# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that a step stages in: which buffer is alive when, and where it lies in one arena.

Buffers that are not alive at the same action of a step, see :mod:`megatron_muon.plan.schedule`, may
lie in the same place.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.schedule import Action, PlanOrder, actions_of
from megatron_muon.plan.wire import Wire

# Source: CUDA's allocations are aligned to 256 bytes. Kernels that read 16 bytes at once, and
# cuBLAS's fast ones, need less.
_ALIGNMENT = 256


class BucketSizes(NamedTuple):
    """What one rank stages for a bucket, in elements or in bytes; or the first byte of each.

    Args:
        gather_send: Rows for other owners.
        gather_receive: Rows from other ranks.
        stacks: What it owns, padding included; nothing where rows arrive in place.
    """

    gather_send: int
    gather_receive: int
    stacks: int

    @property
    def in_place(self) -> "BucketSizes":
        """What it stages where it receives rows in the stack: its own ones are sent as well."""
        kept = self.stacks - self.gather_receive
        return BucketSizes(self.gather_send + kept, self.stacks, 0)

    def in_bytes(self, wire: Wire) -> "BucketSizes":
        """Convert elements to bytes."""
        return BucketSizes(*(size * wire.gather_bytes for size in self))


class ScatterSizes(NamedTuple):
    """What one rank stages for a scatter, in elements or in bytes; or the first byte of each.

    Args:
        send: Results for other holders.
        receive: Results of its own rows; with replicas, the chunks of all of them.
    """

    send: int
    receive: int

    def in_bytes(self, wire: Wire) -> "ScatterSizes":
        """Convert elements to bytes."""
        return ScatterSizes(*(size * wire.scatter_bytes for size in self))


class _Lifetime(NamedTuple):
    """First and last action of a buffer, both included, by their positions in the step."""

    first: int
    last: int


class PlanStaging(NamedTuple):
    """What one rank stages for one of its plans.

    Args:
        order: What decides the order of a step.
        buckets: Bytes of the buffers of each bucket.
        scatters: Bytes of the buffers of each scatter, over all buckets.
        local_bytes: Bytes of the largest stack of local matrices.
    """

    order: PlanOrder
    buckets: Sequence[BucketSizes]
    scatters: Sequence[ScatterSizes]
    local_bytes: int


class PlanPlaces(NamedTuple):
    """Where the buffers of one plan lie.

    Args:
        buckets: First byte of each buffer, for each bucket.
        scatters: First byte of each buffer, for each scatter.
    """

    buckets: tuple[BucketSizes, ...]
    scatters: tuple[ScatterSizes, ...]


@dataclass(frozen=True)
class StagingLayout:
    """Places of all buffers of one rank in one arena.

    Args:
        plans: Places of each plan.
        local: First byte of the stack of local matrices, for each round and for the end. Stacks of
            a round share it: they are orthogonalized one after the other.
        num_bytes: Size of the arena: the most that is alive at one action, and what buffers of
            different sizes leave unused between them.
    """

    plans: tuple[PlanPlaces, ...]
    local: tuple[int, ...]
    num_bytes: int

    @classmethod
    def build(cls, plans: Sequence[PlanStaging]) -> "StagingLayout":
        """Place the buffers.

        Args:
            plans: What the rank stages for each of its plans.
        """
        places, num_bytes = _place(_sizes(plans), _lifetimes(tuple(plan.order for plan in plans)))
        rest = iter(places)
        return cls(
            tuple(
                PlanPlaces(
                    tuple(BucketSizes(*(next(rest) for _ in each)) for each in plan.buckets),
                    tuple(ScatterSizes(*(next(rest) for _ in each)) for each in plan.scatters),
                )
                for plan in plans
            ),
            tuple(rest),
            num_bytes,
        )


def most_alive(plans: Sequence[PlanStaging]) -> int:
    """Return the most bytes that are alive at one action: no placement takes less."""
    change: Counter[int] = Counter()
    lifetimes = _lifetimes(tuple(plan.order for plan in plans))
    for size, alive in zip(_sizes(plans), lifetimes, strict=True):
        if size:
            change[alive.first] += aligned_size(size)
            change[alive.last + 1] -= aligned_size(size)
    most = now = 0
    for position in sorted(change):
        now += change[position]
        most = max(most, now)
    return most


def _sizes(plans: Sequence[PlanStaging]) -> list[int]:
    """Return the size of every buffer, in the order of :class:`StagingLayout`."""
    sizes: list[int] = []
    for plan in plans:
        sizes += (size for each in plan.buckets for size in each)
        sizes += (size for each in plan.scatters for size in each)
    num_rounds = sum(plan.order.num_buckets for plan in plans)
    # Local matrices may be due in any round, and at the end.
    return sizes + [max((plan.local_bytes for plan in plans), default=0)] * (num_rounds + 1)


# Ranks differ in sizes, few of them in the order of their step.
@functools.lru_cache(maxsize=16)
def _lifetimes(orders: tuple[PlanOrder, ...]) -> tuple[_Lifetime, ...]:
    """Return the lifetime of every buffer, in the order of :class:`StagingLayout`."""
    actions = actions_of(orders)
    position = {action: number for number, action in enumerate(actions)}
    lifetimes: list[_Lifetime] = []
    for plan, order in enumerate(orders):
        for bucket in range(order.num_buckets):
            lifetimes += _of_bucket(plan, bucket, order, position)
        for scatter in range(order.num_buckets * order.num_scatters):
            lifetimes += _of_scatter(plan, scatter, order, position)
    lifetimes += (_Lifetime(i, i) for i, action in enumerate(actions) if action.kind == "local")
    return tuple(lifetimes)


def _of_bucket(
    plan: int, bucket: int, order: PlanOrder, position: Mapping[Action, int]
) -> tuple[_Lifetime, ...]:
    gathers = order.gathers_of(bucket)
    packed = position[Action("start_gather", plan, gathers[0])]
    arrived = position[Action("wait_for_gather", plan, gathers[-1])]
    # Newton-Schulz writes its first step elsewhere; upstream refuses to take none. Portioned or
    # not, the last product reads no stack.
    orthogonalized = position[Action("orthogonalize", plan, bucket)]
    filled = orthogonalized
    if order.is_portioned:
        filled = position[Action("first_product", plan, gathers[0])]
    return (
        _Lifetime(packed, arrived),
        _Lifetime(packed, orthogonalized),
        _Lifetime(filled, orthogonalized),
    )


def _of_scatter(
    plan: int, scatter: int, order: PlanOrder, position: Mapping[Action, int]
) -> tuple[_Lifetime, ...]:
    packed = position[Action("start_scatter", plan, scatter)]
    applied = position[Action("finish_scatter", plan, scatter)]
    # Where replicas pass results on, a rank learns only then that they have left their owner.
    return _Lifetime(packed, applied), _Lifetime(packed, applied)


def aligned_size(size: int) -> int:
    """Return the bytes that a buffer takes in the arena."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _place(sizes: Sequence[int], lifetimes: Sequence[_Lifetime]) -> tuple[list[int], int]:
    """Place buffers of known lifetimes, in the best of several orders, each as low as it fits.

    The best placement is NP-hard. No order is the best for all plans of docs/performance.md. To try
    each again, with what ended highest placed first, gains nothing on any of them.
    """
    aligned = [aligned_size(size) for size in sizes]
    # A rank takes part in few buckets: most buffers are empty, and lie anywhere.
    used = [index for index, size in enumerate(aligned) if size]
    beside, busiest = _alive_together(used, aligned, lifetimes)
    best: tuple[list[int], int] = [], 0
    for rule in _ORDERS:
        order = sorted(used, key=lambda index: rule(aligned[index], lifetimes[index]))
        offsets, end = _place_in_order(aligned, beside, order)
        if not best[0] or end < best[1]:
            best = offsets, end
        if end == busiest:
            break
    return best


def _alive_together(
    indices: Sequence[int], sizes: Sequence[int], lifetimes: Sequence[_Lifetime]
) -> tuple[dict[int, list[int]], int]:
    """Return the buffers that are alive at some action of each, and the most bytes at one action.

    Buffers are met in the order in which they begin. Only those that have not ended are compared:
    thousands of scatters follow each other, a few of them at a time.

    Args:
        indices: Buffers that have bytes.
        sizes: Bytes of all buffers.
        lifetimes: Of all buffers.
    """
    beside: dict[int, list[int]] = {index: [] for index in indices}
    alive: list[int] = []
    most = 0
    for index in sorted(indices, key=lambda each: lifetimes[each].first):
        alive = [other for other in alive if lifetimes[other].last >= lifetimes[index].first]
        for other in alive:
            beside[other].append(index)
        beside[index] += alive
        alive.append(index)
        # What is alive only grows where a lifetime begins.
        most = max(most, sum(sizes[each] for each in alive))
    return beside, most


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
