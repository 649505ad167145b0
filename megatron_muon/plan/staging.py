# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that a step stages in: which buffer is alive when, and where it lies in one arena.

A step with buckets 0, 1, ... runs in rounds. In round ``i``::

    moment  what happens
    0       local matrices are orthogonalized, one stack after the other
    1       the gather of bucket i has arrived; rows of bucket i + 1 are packed, its gather starts
    2       rows of bucket i are copied to its stacks and orthogonalized, into new memory
    3       the scatter of bucket i - 1 has arrived, and is applied
    4       results of bucket i are packed, its scatter starts

Buffers that are not alive at the same moment may lie in the same place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.wire import Wire

_MOMENTS = 5  # of a round
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


@dataclass(frozen=True)
class StagingLayout:
    """Places of all buffers of one rank in one arena.

    Args:
        buckets: First byte of each buffer, for each bucket.
        local: First byte of the stack of local matrices, for each round. Stacks of a round share
            it: they are orthogonalized one after the other.
        num_bytes: Size of the arena: the most that is alive at one moment, and what buffers of
            different sizes leave unused between them.
    """

    buckets: tuple[BucketSizes, ...]
    local: tuple[int, ...]
    num_bytes: int

    @classmethod
    def build(cls, buckets: Sequence[BucketSizes], local_bytes: int) -> "StagingLayout":
        """Place the buffers.

        Args:
            buckets: Bytes of the buffers of each bucket.
            local_bytes: Bytes of the largest stack of local matrices, which may be due in any
                round. Without buckets there is one round.
        """
        num_rounds = max(1, len(buckets))
        sizes = [size for bucket in buckets for size in bucket]
        lifetimes = [each for index in range(len(buckets)) for each in _lifetimes(index)]
        lifetimes += [_Lifetime(_MOMENTS * i, _MOMENTS * i) for i in range(num_rounds)]
        offsets, num_bytes = _place([*sizes, *[local_bytes] * num_rounds], lifetimes)
        of_buckets, of_local = offsets[: len(sizes)], offsets[len(sizes) :]
        width = len(BucketSizes._fields)
        return cls(
            tuple(
                BucketSizes(*of_buckets[start : start + width])
                for start in range(0, len(of_buckets), width)
            ),
            tuple(of_local),
            num_bytes,
        )


def _lifetimes(bucket: int) -> list[_Lifetime]:
    """Return when the buffers of a bucket are alive, in the order of :class:`BucketSizes`."""
    now = _MOMENTS * bucket
    packed, scattered = now - _MOMENTS + 1, now + _MOMENTS + 3
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

    The best placement is NP-hard. No order is the best for all plans of docs/performance.md: by
    size Llama-70B on 64 ranks takes 4.8 GB, by the end of a lifetime 5.1, and the best for each
    rank 4.5, which is what is alive at once.
    """
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    # What is alive only grows where a lifetime begins.
    busiest = max(
        (
            sum(
                size
                for size, other in zip(aligned, lifetimes, strict=True)
                if other.first <= lifetime.first <= other.last
            )
            for lifetime in lifetimes
        ),
        default=0,
    )
    best: tuple[list[int], int] = [], 0
    for order in _ORDERS:
        in_order = sorted(
            range(len(sizes)), key=lambda index: order(aligned[index], lifetimes[index])
        )
        offsets, end = _place_in_order(aligned, lifetimes, in_order)
        if not best[0] or end < best[1]:
            best = offsets, end
        if end == busiest:
            break
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
    sizes: Sequence[int], lifetimes: Sequence[_Lifetime], order: Sequence[int]
) -> tuple[list[int], int]:
    """Place each buffer at the lowest gap between those that are placed and alive beside it."""
    offsets = [0] * len(sizes)
    placed: list[int] = []
    end = 0
    for index in order:
        beside = [i for i in placed if lifetimes[i].overlaps(lifetimes[index])]
        offset = 0
        for start, stop in sorted((offsets[i], offsets[i] + sizes[i]) for i in beside):
            if offset + sizes[index] <= start:
                break
            offset = max(offset, stop)
        offsets[index] = offset
        placed.append(index)
        end = max(end, offset + sizes[index])
    return offsets, end
