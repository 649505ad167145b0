# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of messages and stacks: the lifetime of every buffer, and its offset in one arena.

Buffers share memory if they are not alive at the same action of a step, see
``megatron_muon.plan.schedule``. A ring of slots of the largest size would need twice the memory.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.schedule import Action, PlanOrder, actions_of
from megatron_muon.plan.settings import CommDtypes

# Source: CUDA's allocations are aligned to 256 bytes. Kernels that read 16 bytes at once, and
# cuBLAS's fast ones, need less.
_ALIGNMENT = 256

# First and last action of a buffer, both included, by their positions in the step.
type Lifetime = tuple[int, int]


class BucketSizes(NamedTuple):
    """Elements of one rank's buffers for a bucket, or offsets in bytes.

    Args:
        gather_send: Rows for other owners.
        gather_receive: Rows from other ranks.
        stacks: Its stacks.
        scatter_send: Results for other holders.
        scatter_receive: Results of its rows; with replicas, the sections of all of them.
    """

    gather_send: int
    gather_receive: int
    stacks: int
    scatter_send: int
    scatter_receive: int


class PlanStaging(NamedTuple):
    """Staging memory of one rank for one of its plans.

    Args:
        order: What decides the order of a step.
        buckets: Elements of the buffers by bucket.
        local: Elements of the largest stack of local matrices.
        dtypes: Dtypes of the buffers.
    """

    order: PlanOrder
    buckets: tuple[BucketSizes, ...]
    local: int
    dtypes: CommDtypes

    def buffers(self) -> list[int]:
        """Return the bytes of every buffer, by bucket, and of the stack of local matrices."""
        gathered, scattered = self.dtypes.gather_bytes, self.dtypes.scatter_bytes
        stacked = self.dtypes.stack_bytes
        widths = (gathered, gathered, stacked, scattered, scattered)
        return [
            *(n * width for b in self.buckets for n, width in zip(b, widths, strict=True)),
            self.local * stacked,
        ]


@dataclass(frozen=True)
class StagingLayout:
    """Offsets of all buffers of one rank in one arena.

    Args:
        plans: Offsets by plan and bucket.
        local: Offset of the stack of local matrices, by round and for the end. Stacks of a round
            share it: they are orthogonalized one after the other.
        num_bytes: Size of the arena: the largest sum of live buffers, and gaps between buffers of
            different sizes.
    """

    plans: tuple[tuple[BucketSizes, ...], ...]
    local: tuple[int, ...]
    num_bytes: int

    @classmethod
    def build(cls, plans: Sequence[PlanStaging]) -> "StagingLayout":
        """Place the buffers of all plans of a rank."""
        sizes, local_bytes = [], 0
        for plan in plans:
            *buffers, local = plan.buffers()
            sizes += buffers
            local_bytes = max(local_bytes, local)
        orders = tuple(plan.order for plan in plans)
        # Local matrices may be due in any round, and at the end.
        sizes += [local_bytes] * (1 + sum(order.num_buckets for order in orders))
        places, num_bytes = _place(sizes, _lifetimes(orders))
        rest = iter(places)
        return cls(
            tuple(
                tuple(BucketSizes(*(next(rest) for _ in bucket)) for bucket in plan.buckets)
                for plan in plans
            ),
            tuple(rest),
            num_bytes,
        )


# Ranks differ in sizes, few of them in the order of their step.
@functools.lru_cache(maxsize=16)
def _lifetimes(orders: tuple[PlanOrder, ...]) -> tuple[Lifetime, ...]:
    """Return the lifetime of every buffer, in the order of ``StagingLayout``."""
    actions = actions_of(orders)
    position = {action: number for number, action in enumerate(actions)}
    lifetimes: list[Lifetime] = []
    for plan, order in enumerate(orders):
        for bucket in range(order.num_buckets):
            packed = position[Action("start_gather", plan, bucket)]
            arrived = position[Action("wait_for_gather", plan, bucket)]
            orthogonalized = position[Action("orthogonalize", plan, bucket)]
            # Results replace the rows in the stacks, and leave with the scatter.
            left = position[Action("start_scatter", plan, bucket)]
            lifetimes += [(packed, arrived), (packed, orthogonalized), (orthogonalized, left)]
            # With replicas a rank waits for its messages only in finish_scatter, too.
            lifetimes += [(left, position[Action("finish_scatter", plan, bucket)])] * 2
    lifetimes += ((i, i) for i, action in enumerate(actions) if action.kind == "local")
    return tuple(lifetimes)


def aligned_size(size: int) -> int:
    """Round up to the alignment of the arena."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _place(sizes: Sequence[int], lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Place buffers, the largest first, as low as they fit; return offsets and the arena's size."""
    # A rank has a part in few buckets: most buffers are empty, and have any offset.
    used = [
        (-aligned_size(size), *lifetimes[index], index) for index, size in enumerate(sizes) if size
    ]
    used.sort(key=lambda buffer: buffer[:2])
    offsets, num_bytes = [0] * len(sizes), 0
    placed: list[tuple[int, int, int, int]] = []
    for negative_size, first, last, index in used:
        offset = 0
        for start, stop, other_first, other_last in sorted(placed):
            if other_first <= last and first <= other_last:
                if offset - negative_size <= start:
                    break
                offset = max(offset, stop)
        end = offset - negative_size
        offsets[index] = offset
        placed.append((offset, end, first, last))
        num_bytes = max(num_bytes, end)
    return offsets, num_bytes
