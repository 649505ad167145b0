# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Matrices that are exchanged together, and how much is in flight: rules, no search.

Buckets are slices of time: every bucket has about the same share of every owner's work. None is
shorter than the longest matrix, or so short that its collectives cost more than they can hide, and
there are as many as the busiest owner has time for. If memory is short, there are more of them.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in every bucket most ranks would wait for the few that own some.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.plan.schedule import Depth, PlanOrder
from megatron_muon.plan.sizes import RankSizes, SizeCounter, Stacking
from megatron_muon.plan.staging import PlanStaging, StagingLayout, aligned_size

# More buckets gain little.
_MAX_BUCKETS = 16
# The two collectives of a bucket may cost this fraction of its work. Measured on 4 CPU ranks with
# small matrices (hidden 128): 147 ms in one bucket, 198 ms in 16.
_MAX_OVERHEAD = 0.1
# Gathers in flight beside the bucket in work, and as many scatters.
_DEPTH = 2
# Replicas pass one scatter on while another arrives: at least this many in a step.
_MIN_SCATTERS = 4
# Buckets for lack of memory, at most.
_MAX_FOR_MEMORY = 64


@dataclass(frozen=True)
class ExchangedMatrix:
    """A matrix that has to be exchanged.

    Args:
        index: Index in the plan.
        owners: Its owners.
        load_ns: Newton-Schulz on each owner.
        layout_key: Equal for matrices with the same shards.
    """

    index: int
    owners: tuple[int, ...]
    load_ns: int
    layout_key: Hashable


class Buckets(NamedTuple):
    """The buckets of a plan.

    Args:
        matrices: Indices of the matrices of each bucket, ascending.
        order: What of them decides the order of a step.
        staging_bytes: Memory that they need on the fullest rank.
    """

    matrices: tuple[tuple[int, ...], ...]
    order: PlanOrder
    staging_bytes: int


def choose_buckets(
    matrices: Sequence[ExchangedMatrix],
    local: Sequence[int],
    stacking: Stacking,
    staging_bytes: int,
    *,
    has_replicas: bool,
    num_buckets: int | None = None,
) -> Buckets:
    """Return the first buckets that fit into memory; those that need least where none do.

    Args:
        matrices: Matrices to exchange.
        local: Indices of local matrices.
        stacking: Stacks, owners and the dtypes.
        staging_bytes: Memory of a rank for messages and stacks.
        has_replicas: Whether any shard has several holders.
        num_buckets: Number of buckets to start from; None for the rule.
    """
    local_bytes = {
        owner: max(stack.num_elements for stack in stacks) * stacking.dtypes.stack_bytes
        for owner, stacks in stacking.stacks(local).items()
    }
    if not matrices:
        order = PlanOrder(0, 1, Depth(1, 1), has_replicas)
        return Buckets((), order, aligned_size(max(local_bytes.values(), default=0)))
    counter = SizeCounter(stacking, has_replicas=has_replicas)
    count = num_buckets or _num_buckets(matrices, stacking)
    tried: list[Buckets] = []
    while True:
        buckets = _fill_buckets(matrices, count)
        num_scatters = -(-_MIN_SCATTERS // len(buckets)) if has_replicas else 1
        sizes = _distinct_sizes(
            [counter.sizes(each, num_scatters) for each in buckets], local_bytes
        )
        # Less in flight costs overlap alone; more buckets need more collectives.
        for ahead in range(min(_DEPTH, len(buckets)), 0, -1):
            depth = Depth(ahead, ahead * num_scatters)
            order = PlanOrder(len(buckets), num_scatters, depth, has_replicas)
            found = Buckets(tuple(buckets), order, _bytes_of_fullest(sizes, order, stacking))
            if found.staging_bytes <= staging_bytes:
                return found
            tried.append(found)
        count *= 2
        if count > _MAX_FOR_MEMORY or len(buckets) == len(matrices):
            return min(tried, key=lambda buckets: buckets.staging_bytes)


def _num_buckets(matrices: Sequence[ExchangedMatrix], stacking: Stacking) -> int:
    """Return how often the shortest possible bucket fits into the time of the busiest owner."""
    ranks = stacking.matrices[matrices[0].index].ranks
    shortest_ns = 2 * stacking.cost.collective_ns(ranks) / _MAX_OVERHEAD
    load_ns: Counter[int] = Counter()
    for matrix in matrices:
        for owner in matrix.owners:
            load_ns[owner] += matrix.load_ns
    shortest_ns = max(1, shortest_ns, *(matrix.load_ns for matrix in matrices))
    return max(1, min(_MAX_BUCKETS, round(max(load_ns.values()) / shortest_ns)))


@dataclass
class _Draft:
    """A bucket that is being filled."""

    matrices: list[int] = field(default_factory=list)
    load_ns: Counter[int] = field(default_factory=Counter)
    num_same_layout: Counter[Hashable] = field(default_factory=Counter)


def _fill_buckets(matrices: Sequence[ExchangedMatrix], count: int) -> list[tuple[int, ...]]:
    """Assign matrices to buckets, longest first, to where their owners have least to do.

    Ties go to the bucket with the fewest matrices of the same layout: then no bucket has all
    matrices of a shape, whose few holders would send all that it gathers.

    Args:
        matrices: The matrices.
        count: Number of buckets; there are fewer if there are not as many matrices.
    """
    drafts = [_Draft() for _ in range(count)]
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.load_ns, matrix.index)):
        draft = min(
            drafts,
            key=lambda draft: (
                max(draft.load_ns[owner] for owner in matrix.owners),
                draft.num_same_layout[matrix.layout_key],
            ),
        )
        draft.matrices.append(matrix.index)
        draft.num_same_layout[matrix.layout_key] += 1
        for owner in matrix.owners:
            draft.load_ns[owner] += matrix.load_ns
    # The shortest bucket first, so that work starts early.
    return [tuple(sorted(draft.matrices)) for draft in reversed(drafts) if draft.matrices]


# Buffers of a rank in all buckets, and the bytes of its largest stack of local matrices.
type _Sizes = set[tuple[tuple[RankSizes, ...], int]]


def _distinct_sizes(
    of_buckets: Sequence[Mapping[int, RankSizes]], local_bytes: Mapping[int, int]
) -> _Sizes:
    """Return the buffers of all ranks without repetitions: most ranks have the same."""
    nothing = RankSizes.nothing(len(next(iter(of_buckets[0].values())).scatters))
    ranks = set(local_bytes).union(*of_buckets)
    return {
        (tuple(sizes.get(rank, nothing) for sizes in of_buckets), local_bytes.get(rank, 0))
        for rank in ranks
    }


def _bytes_of_fullest(sizes: _Sizes, order: PlanOrder, stacking: Stacking) -> int:
    """Return the bytes that the fullest rank stages: those that its engine will allocate."""
    dtypes = stacking.dtypes
    stagings = []
    for of_buckets, local_bytes in sizes:
        buckets = [each.bucket.in_bytes(dtypes) for each in of_buckets]
        scatters = [scatter.in_bytes(dtypes) for each in of_buckets for scatter in each.scatters]
        total = sum(itertools.chain(*buckets, *scatters)) + local_bytes
        stagings.append((total, PlanStaging(order, buckets, scatters, local_bytes)))
    most = 0
    # The largest first: ranks whose buffers need less even without sharing are not laid out. Every
    # buffer, of which there are at most five for each scatter and one, is rounded up.
    slack = aligned_size(1) * (5 * order.num_buckets * order.num_scatters + 1)
    for total, staging in sorted(stagings, key=lambda pair: -pair[0]):
        if total + slack <= most:
            break
        most = max(most, StagingLayout.build([staging]).num_bytes)
    return most
