# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of a step: one list of actions, which is run, estimated and given memory.

A step is a list of rounds, each for one bucket of one plan. The round of bucket i::

    local             local matrices are orthogonalized, one stack after the other
    wait_for_gather   the rows of bucket i have arrived
    start_gather      the gathers of bucket i + ahead are packed, and start
    orthogonalize     rows of bucket i are copied to its stacks and orthogonalized, into new memory

    and for each scatter j of the bucket:
    finish_scatter    scatter j - behind has ended, and is applied
    start_scatter     results of scatter j are packed, and start to travel

Before the first round the gathers of the first ``ahead`` buckets of every plan start. After the
last one come the local matrices that are left, and what is still in flight. Without replicas a
bucket has one scatter.

With replicas, results are passed on behind their scatter, in the order in which the rank starts
scatters: on a GPU as soon as the scatter has ended, on gloo in ``finish_scatter``
(:class:`~megatron_muon.runtime.exchange.Chain`). ``finish_scatter`` waits until they have been
passed on.

Ranks of one plan may differ in their other plans, as with expert parallelism. Two things keep them
from waiting for each other for ever:

- The collectives of a plan come in one order on all ranks, whatever other plans there are.
- Bucket i of n has its turn when the rank is (i + 1/2) / n through the step; of equal turns that of
  the earlier plan comes first, and ranks have their plans in one order. What a rank waits for was
  launched by all ranks in an earlier turn of the same plan, or earlier in the same turn, in which
  all ranks have one order; the same holds for all that comes before what is passed on. Owners of a
  split matrix, and on gloo replicas, wait for each other in the same turn. So there is no deadlock:
  the rank that is furthest behind only waits for collectives that every rank has launched.
"""

import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple


class Depth(NamedTuple):
    """How much of a plan is in flight.

    Args:
        ahead: Gathers of later buckets that may be in flight while a bucket is orthogonalized.
            With more, a rank waits less for others that come to their gathers late.
        behind: Scatters that are in flight at once, the one that starts included.
    """

    ahead: int
    behind: int


class PlanOrder(NamedTuple):
    """Numbers of a plan that decide the order of a step.

    Args:
        num_buckets: Buckets.
        num_scatters: Scatters of each bucket.
        depth: How much is in flight.
        has_replicas: Whether replicas pass results on.
    """

    num_buckets: int
    num_scatters: int
    depth: Depth
    has_replicas: bool

    def scatters_of(self, bucket: int) -> range:
        """Return the numbers of the scatters of a bucket."""
        return range(bucket * self.num_scatters, (bucket + 1) * self.num_scatters)


class Round(NamedTuple):
    """The turn of one bucket.

    Args:
        plan: Position of its plan among those of the rank.
        bucket: Number of the bucket.
    """

    plan: int
    bucket: int


ActionKind = Literal[
    "local",
    "start_gather",
    "wait_for_gather",
    "orthogonalize",
    "start_scatter",
    "finish_scatter",
]


class Action(NamedTuple):
    """One thing that a rank does.

    Args:
        kind: What it does.
        plan: Position of its plan among those of the rank; 0 for local matrices, which may be of
            any plan.
        number: Number of the bucket; for scatters that of the scatter, counted over all buckets;
            for local matrices that of the round, and the number of rounds at the end of the step.
    """

    kind: ActionKind
    plan: int
    number: int


# Thousands of ranks have plans of the same order.
@functools.lru_cache(maxsize=256)
def actions_of(plans: tuple[PlanOrder, ...]) -> tuple[Action, ...]:
    """Return what a rank does in a step, in order.

    Args:
        plans: Plans of the rank.
    """
    return tuple(_step(plans))


def _step(plans: Sequence[PlanOrder]) -> Iterator[Action]:
    # A gather needs gradients and memory, no result: all that memory allows start at once.
    for plan, order in enumerate(plans):
        for bucket in range(min(order.depth.ahead, order.num_buckets)):
            yield Action("start_gather", plan, bucket)
    rounds = rounds_of([order.num_buckets for order in plans])
    for number, turn in enumerate(rounds):
        # Before the wait: they are what a rank can do while rows are in flight.
        yield Action("local", 0, number)
        yield from _round(turn, plans[turn.plan])
    # While the last results are in flight.
    yield Action("local", 0, len(rounds))
    for plan, order in enumerate(plans):
        end = order.num_buckets * order.num_scatters
        for scatter in range(max(0, end - order.depth.behind), end):
            yield Action("finish_scatter", plan, scatter)


def _round(turn: Round, order: PlanOrder) -> Iterator[Action]:
    plan, bucket = turn
    depth = order.depth
    yield Action("wait_for_gather", plan, bucket)
    # Now this bucket's messages have left the memory that the next gather is packed into. It starts
    # before Newton-Schulz, which hides it.
    if bucket + depth.ahead < order.num_buckets:
        yield Action("start_gather", plan, bucket + depth.ahead)
    yield Action("orthogonalize", plan, bucket)
    # Earlier results are only waited for now: they had all of this bucket's Newton-Schulz to
    # arrive. Their memory may serve this bucket's results.
    for scatter in order.scatters_of(bucket):
        if scatter >= depth.behind:
            yield Action("finish_scatter", plan, scatter - depth.behind)
        yield Action("start_scatter", plan, scatter)


def rounds_of(num_buckets: Sequence[int]) -> tuple[Round, ...]:
    """Return the rounds of a step, in order.

    Every plan gets through its buckets evenly. One plan after the other would be worse: where a
    rank has nothing to do in the second plan, it would still keep others waiting there until it is
    done with the first.

    Args:
        num_buckets: Buckets of each plan of the rank.
    """
    # Fractions, not floats: ranks with other plans must see the same ties.
    turns: list[tuple[Fraction, Round]] = [
        (Fraction(2 * bucket + 1, 2 * number), Round(plan, bucket))
        for plan, number in enumerate(num_buckets)
        for bucket in range(number)
    ]
    return tuple(each for _, each in sorted(turns))
