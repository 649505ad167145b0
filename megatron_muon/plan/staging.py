# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of messages and stacks: the lifetime of every buffer, and its offset in one arena.

Buffers share memory if they are not alive at the same action of a step, see
``megatron_muon.plan.schedule``. A ring of slots of the largest size would need twice the memory.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.schedule import Action, ActionKind, actions_of
from megatron_muon.plan.settings import DTYPE_BYTES, CommDtypes

# Source: CUDA's allocations are aligned to 256 bytes. Kernels that read 16 bytes at once, and
# cuBLAS's fast ones, need less.
_ALIGNMENT = 256

# First and last action of a buffer, both included, by their positions in the step.
type Lifetime = tuple[int, int]


class BucketSizes(NamedTuple):
    """Sizes of one rank's buffers for a bucket, or their offsets: elements or bytes.

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

    def in_bytes(self, dtypes: CommDtypes) -> "BucketSizes":
        """Return the sizes in bytes, given elements."""
        widths = (DTYPE_BYTES[name] for name in dtypes.of_buffers)
        return BucketSizes(*map(operator.mul, self, widths))


class PlanStaging(NamedTuple):
    """Staging memory of one rank for one of its plans, bytes.

    Args:
        buckets: Buffers by bucket.
        local: The largest stack of local matrices.
    """

    buckets: tuple[BucketSizes, ...]
    local: int


@dataclass(frozen=True)
class StagingLayout:
    """Offsets of all buffers of one rank in one arena, bytes.

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
        num_buckets = tuple(len(plan.buckets) for plan in plans)
        sizes = [size for plan in plans for bucket in plan.buckets for size in bucket]
        # Local matrices may be due in any round, and at the end.
        sizes += [max((plan.local for plan in plans), default=0)] * (1 + sum(num_buckets))
        offsets, num_bytes = _place(sizes, _lifetimes(num_buckets))
        rest = iter(offsets)
        return cls(
            tuple(
                tuple(BucketSizes(*(next(rest) for _ in bucket)) for bucket in plan.buckets)
                for plan in plans
            ),
            tuple(rest),
            num_bytes,
        )


# Actions that a buffer of a bucket is alive from and to, by its position in BucketSizes.
_ALIVE: tuple[tuple[ActionKind, ActionKind], ...] = (
    ("start_gather", "wait_for_gather"),
    ("start_gather", "orthogonalize"),
    # Results replace the rows in the stacks, and leave with the scatter.
    ("orthogonalize", "start_scatter"),
    # With replicas a rank waits for its messages only in finish_scatter, too.
    ("start_scatter", "finish_scatter"),
    ("start_scatter", "finish_scatter"),
)


# Ranks differ in sizes, few of them in the order of their step.
@functools.lru_cache(maxsize=16)
def _lifetimes(num_buckets: tuple[int, ...]) -> tuple[Lifetime, ...]:
    """Return the lifetime of every buffer, in the order of ``StagingLayout``."""
    position = {action: number for number, action in enumerate(actions_of(num_buckets))}
    lifetimes = [
        (position[Action(first, plan, bucket)], position[Action(last, plan, bucket)])
        for plan, end in enumerate(num_buckets)
        for bucket in range(end)
        for first, last in _ALIVE
    ]
    lifetimes += ((i, i) for action, i in position.items() if action.kind == "local_matrices")
    return tuple(lifetimes)


class _Buffer(NamedTuple):
    size: int
    first: int  # action
    last: int
    number: int


def _place(sizes: Sequence[int], lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Place buffers, the largest first, as low as they fit; return offsets and the arena's size.

    Large is a buffer of many bytes, or of many bytes for many actions, whichever needs less memory:
    neither order is the better one for all jobs.
    """
    # A rank has a part in few buckets: most buffers are empty, and have any offset.
    used = [
        _Buffer(-(-n // _ALIGNMENT) * _ALIGNMENT, *lifetimes[i], i)
        for i, n in enumerate(sizes)
        if n
    ]
    used.sort(key=lambda buffer: (-buffer.size, buffer.first, buffer.last))
    by_area = sorted(used, key=lambda b: (-b.size * (b.last - b.first + 1), b.first, b.last))
    placed = (_place_in(order, len(sizes)) for order in (used, by_area))
    return min(placed, key=operator.itemgetter(1))


def _place_in(order: Sequence[_Buffer], num_buffers: int) -> tuple[list[int], int]:
    """Place buffers in an order."""
    offsets, num_bytes = [0] * num_buffers, 0
    placed: list[tuple[int, int, _Buffer]] = []
    for buffer in order:
        offset = 0
        for start, stop, other in sorted(placed):
            if other.first <= buffer.last and buffer.first <= other.last:
                if offset + buffer.size <= start:
                    break
                offset = max(offset, stop)
        offsets[buffer.number] = offset
        placed.append((offset, offset + buffer.size, buffer))
        num_bytes = max(num_bytes, offset + buffer.size)
    return offsets, num_bytes
