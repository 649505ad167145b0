# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of messages and stacks: the lifetime of every buffer, and its offset in one arena.

Buffers share memory if they are not alive at the same action of a step, see
:mod:`megatron_muon.plan.schedule`. A ring of slots, each as large as the largest buffer, would need
twice the memory.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.schedule import Action, PlanOrder, actions_of
from megatron_muon.plan.settings import CommDtypes

# Source: CUDA's allocations are aligned to 256 bytes. Kernels that read 16 bytes at once, and
# cuBLAS's fast ones, need less.
_ALIGNMENT = 256


class BucketSizes(NamedTuple):
    """Sizes or offsets of what one rank stages for a bucket, in elements or in bytes.

    Args:
        gather_send: Rows for other owners.
        gather_receive: Rows from other ranks.
        stacks: What it owns.
    """

    gather_send: int
    gather_receive: int
    stacks: int

    def in_bytes(self, dtypes: CommDtypes) -> "BucketSizes":
        """Convert elements to bytes."""
        gathered = dtypes.gather_bytes
        return BucketSizes(
            self.gather_send * gathered,
            self.gather_receive * gathered,
            self.stacks * dtypes.stack_bytes,
        )


class ScatterSizes(NamedTuple):
    """Sizes or offsets of what one rank stages for a scatter, in elements or in bytes.

    Args:
        send: Results for other holders.
        receive: Results of its own rows; with replicas, the chunks of all of them.
    """

    send: int
    receive: int

    def in_bytes(self, dtypes: CommDtypes) -> "ScatterSizes":
        """Convert elements to bytes."""
        return ScatterSizes(*(size * dtypes.scatter_bytes for size in self))


class _Lifetime(NamedTuple):
    """First and last action of a buffer, both included, by their positions in the step."""

    first: int
    last: int


class PlanStaging(NamedTuple):
    """Staging memory of one rank for one of its plans.

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


class PlanOffsets(NamedTuple):
    """Offsets of the buffers of one plan, in bytes.

    Args:
        buckets: Of the buffers of each bucket.
        scatters: Of the buffers of each scatter.
    """

    buckets: tuple[BucketSizes, ...]
    scatters: tuple[ScatterSizes, ...]


@dataclass(frozen=True)
class StagingLayout:
    """Offsets of all buffers of one rank in one arena.

    Args:
        plans: Offsets of each plan.
        local: Offset of the stack of local matrices, for each round and for the end. Stacks of a
            round share it: they are orthogonalized one after the other.
        num_bytes: Size of the arena: the most that is alive at one action, and what buffers of
            different sizes leave unused between them.
    """

    plans: tuple[PlanOffsets, ...]
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
                PlanOffsets(
                    tuple(BucketSizes(*(next(rest) for _ in each)) for each in plan.buckets),
                    tuple(ScatterSizes(*(next(rest) for _ in each)) for each in plan.scatters),
                )
                for plan in plans
            ),
            tuple(rest),
            num_bytes,
        )


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
    packed = position[Action("start_gather", plan, bucket)]
    arrived = position[Action("wait_for_gather", plan, bucket)]
    orthogonalized = position[Action("orthogonalize", plan, bucket)]
    # Results replace the rows in the stacks, and leave with the last scatter.
    left = position[Action("start_scatter", plan, order.scatters_of(bucket)[-1])]
    return (
        _Lifetime(packed, arrived),
        _Lifetime(packed, orthogonalized),
        _Lifetime(orthogonalized, left),
    )


def _of_scatter(
    plan: int, scatter: int, order: PlanOrder, position: Mapping[Action, int]
) -> tuple[_Lifetime, ...]:
    packed = position[Action("start_scatter", plan, scatter)]
    applied = position[Action("finish_scatter", plan, scatter)]
    # With replicas a rank waits for its own messages only in finish_scatter, too.
    return _Lifetime(packed, applied), _Lifetime(packed, applied)


def aligned_size(size: int) -> int:
    """Round up to the alignment of the arena."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _place(sizes: Sequence[int], lifetimes: Sequence[_Lifetime]) -> tuple[list[int], int]:
    """Place buffers of known lifetimes, the largest first, each as low as it fits.

    Returns:
        The offset of every buffer, and the end of the arena.
    """
    aligned = [aligned_size(size) for size in sizes]
    # A rank has a part in few buckets: most buffers are empty, and have any offset.
    used = [index for index, size in enumerate(aligned) if size]
    used.sort(key=lambda index: (-aligned[index], lifetimes[index].first))
    offsets, end = [0] * len(sizes), 0
    placed: list[int] = []
    for index in used:
        first, last = lifetimes[index]
        beside = sorted(
            (offsets[other], offsets[other] + aligned[other])
            for other in placed
            if lifetimes[other].first <= last and first <= lifetimes[other].last
        )
        offset = 0
        for start, stop in beside:
            if offset + aligned[index] <= start:
                break
            offset = max(offset, stop)
        offsets[index] = offset
        placed.append(index)
        end = max(end, offset + aligned[index])
    return offsets, end
