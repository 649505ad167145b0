# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of a step: one list of actions, for execution, estimates and memory.

A step is a list of rounds, one per bucket of a plan. The round of bucket i::

    local_matrices    local matrices are orthogonalized, one stack after the other
    wait_for_gather   the rows of bucket i have arrived
    start_gather      the gather of bucket i + 2 is packed, and starts
    orthogonalize     rows of bucket i are copied to its stacks and orthogonalized, into new memory
    finish_scatter    the scatter of bucket i - 2 has ended, and is applied
    start_scatter     results of bucket i are packed, and start to travel

Before the first round the gathers of the first two buckets of every plan start. After the last one
come the remaining local matrices and messages.

With replicas, results are all-gathered as soon as their scatter has ended (``Chain``).
``finish_scatter`` waits for the all-gather.

Ranks of one plan may differ in their other plans, as with expert parallelism. Two rules exclude
deadlocks:

- The collectives of a plan come in one order on all ranks, independent of other plans.
- Bucket i of n has its turn when the rank is (i + 1/2) / n through the step; of equal turns the
  earlier plan comes first, and ranks have their plans in one order.

A rank waits only for collectives of an earlier turn of the same plan, or of the same turn, in which
all ranks have one order; the same holds for actions before an all-gather. Owners of a split
matrix, and on gloo replicas, wait for each other in the same turn. The rank that is furthest behind
therefore waits only for collectives that every rank has launched.
"""

import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

# Gathers of later buckets in flight while a bucket is orthogonalized; also the number of buckets
# whose scatters are in flight, the current one included. With one, ranks wait for late ranks.
DEPTH = 2


ActionKind = Literal[
    "local_matrices",
    "start_gather",
    "wait_for_gather",
    "orthogonalize",
    "start_scatter",
    "finish_scatter",
]


class Action(NamedTuple):
    """One action of a rank.

    Args:
        kind: Kind of the action.
        plan: Position of its plan in the list of the rank; 0 for local matrices of any plan.
        number: Number of the bucket; of the round for local matrices, and the number of rounds at
            the end of the step.
    """

    kind: ActionKind
    plan: int
    number: int


# Thousands of ranks have plans with the same numbers of buckets.
@functools.lru_cache(maxsize=256)
def actions_of(num_buckets: tuple[int, ...]) -> tuple[Action, ...]:
    """Return the actions of a rank in a step, in order, from the buckets of its plans."""
    return tuple(_actions(num_buckets))


def _actions(num_buckets: Sequence[int]) -> Iterator[Action]:
    # A gather needs gradients and memory, no result: the first ones start at once.
    for plan, end in enumerate(num_buckets):
        for bucket in range(min(DEPTH, end)):
            yield Action("start_gather", plan, bucket)
    rounds = rounds_of(num_buckets)
    for number, (plan, bucket) in enumerate(rounds):
        # Before the wait: local work fills the time of a gather.
        yield Action("local_matrices", 0, number)
        yield Action("wait_for_gather", plan, bucket)
        # Now this bucket's messages have left the memory of the next gather. It starts before
        # Newton-Schulz, which hides it.
        if bucket + DEPTH < num_buckets[plan]:
            yield Action("start_gather", plan, bucket + DEPTH)
        yield Action("orthogonalize", plan, bucket)
        # Earlier results are only waited for now: they had all of this bucket's Newton-Schulz to
        # arrive. Their memory may serve this bucket's results.
        if bucket >= DEPTH:
            yield Action("finish_scatter", plan, bucket - DEPTH)
        yield Action("start_scatter", plan, bucket)
    # While the last results are in flight.
    yield Action("local_matrices", 0, len(rounds))
    for plan, end in enumerate(num_buckets):
        for bucket in range(max(0, end - DEPTH), end):
            yield Action("finish_scatter", plan, bucket)


def rounds_of(num_buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rounds of a step in order, as the position of a plan and the number of its bucket.

    Plans advance through their buckets evenly. One plan after the other would be worse: a rank
    without work in the second plan would keep others waiting there until it is done with the first.
    """
    rounds = [(plan, bucket) for plan, end in enumerate(num_buckets) for bucket in range(end)]
    # Fractions, not floats: ranks with other plans must see the same ties.
    return sorted(rounds, key=lambda r: (Fraction(2 * r[1] + 1, 2 * num_buckets[r[0]]), r))
