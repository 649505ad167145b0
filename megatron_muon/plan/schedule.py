# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of a step: how many buckets are under way, and how the plans of a rank take turns.

A step is a list of rounds, each for one bucket. The round of bucket i of a plan::

    moment  what happens
    0       local matrices are orthogonalized, one stack after the other
    1       the gather of bucket i has arrived; that of bucket i + ahead is packed, and starts
    2       rows of bucket i are copied to its stacks and orthogonalized, into new memory
    3       the scatter of bucket i - behind has arrived, and is applied
    4       results of bucket i are packed, its scatter starts

Before the first round the first ``ahead`` gathers of every plan start. After the last one come the
local matrices that are left, and the scatters that are still under way.

Ranks of one plan may differ in their other plans, as with expert parallelism. Two things keep them
from waiting for each other for ever:

- The collectives of a plan come in one order on all ranks, whatever other plans there are: gathers
  0 to ahead - 1, then gather i + ahead and scatter i in turn.
- Bucket i of n has its turn when the rank is (i + 1/2) / n through the step; of equal turns that of
  the earlier plan comes first, and ranks have their plans in one order. What a rank waits for was
  launched by all ranks in an earlier turn of the same plan. Owners of a split matrix wait for each
  other in the same turn. So of all ranks that wait, the one that is least far never waits for
  another that waits elsewhere.
"""

import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple


class Depth(NamedTuple):
    """How many buckets of a plan are under way.

    Args:
        ahead: Gathers that may have started when a bucket is orthogonalized, its own left out. With
            more, a rank waits less for others that come to their gathers late.
        behind: Scatters that may still travel when a bucket has been orthogonalized.
    """

    ahead: int
    behind: int


class Round(NamedTuple):
    """The turn of one bucket.

    Args:
        plan: Position of its plan among those of the rank.
        bucket: Number of the bucket.
    """

    plan: int
    bucket: int


def rounds_of(num_buckets: Sequence[int]) -> tuple[Round, ...]:
    """Return the rounds of a step, in order.

    Every plan gets through its buckets evenly. One plan after the other would be worse: where a
    rank has nothing to do in the second plan, it would still keep others waiting there until it is
    done with the first.

    Args:
        num_buckets: Buckets of each plan of the rank.
    """
    return _rounds_of(tuple(num_buckets))


# Thousands of ranks have the same numbers of buckets.
@functools.cache
def _rounds_of(num_buckets: tuple[int, ...]) -> tuple[Round, ...]:
    turns: list[tuple[Fraction, Round]] = [
        (Fraction(2 * bucket + 1, 2 * number), Round(plan, bucket))
        for plan, number in enumerate(num_buckets)
        for bucket in range(number)
    ]
    return tuple(each for _, each in sorted(turns))


def finished_in_round(bucket: int, depth: Depth) -> int | None:
    """Return the bucket whose scatter is waited for in the round of a bucket, or None."""
    return bucket - depth.behind if bucket >= depth.behind else None


def started_in_round(bucket: int, num_buckets: int, depth: Depth) -> int | None:
    """Return the bucket whose gather starts in the round of a bucket, or None."""
    return bucket + depth.ahead if bucket + depth.ahead < num_buckets else None


def started_before(num_buckets: int, depth: Depth) -> Iterator[int]:
    """Yield the buckets whose gathers start before the first round."""
    yield from range(min(depth.ahead, num_buckets))


def finished_after(num_buckets: int, depth: Depth) -> Iterator[int]:
    """Yield the buckets whose scatters are waited for after the last round."""
    yield from range(max(0, num_buckets - depth.behind), num_buckets)
