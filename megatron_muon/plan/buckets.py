# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Buckets of matrices: rules, no search.

Buckets are slices of time: every bucket has about the same share of every owner's work. None is
shorter than the longest matrix, or so short that its collectives cost more than they can hide. The
load of the busiest owner sets their number, which is doubled while memory is short.

Rejected: a bucket per layer, or slices in parameter order. A layer has a handful of matrices,
and in every bucket most ranks would wait for a few owners.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.plan.owners import matrix_ns
from megatron_muon.plan.schedule import PlanOrder
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.plan.sizes import SizeCounter
from megatron_muon.plan.staging import PlanStaging, StagingLayout, aligned_size

# More buckets gain little.
_MAX_BUCKETS = 16
# The two collectives of a bucket may cost this fraction of its work. Measured on 4 CPU ranks with
# small matrices (hidden 128): 147 ms in one bucket, 198 ms in 16.
_MAX_OVERHEAD = 0.1
# Buckets for lack of memory, at most.
_MAX_FOR_MEMORY = 64


class Buckets(NamedTuple):
    """The buckets of a plan.

    Args:
        matrices: Indices of the matrices by bucket, ascending.
        order: Numbers that decide the order of a step.
        staging_bytes: Staging memory of the fullest rank.
    """

    matrices: tuple[tuple[int, ...], ...]
    order: PlanOrder
    staging_bytes: int


def choose_buckets(
    indices: Sequence[int], local: Sequence[int], sizes: SizeCounter, settings: PlanSettings
) -> Buckets:
    """Return the first buckets that fit into ``settings.staging_bytes`` a rank, else the last."""
    load_ns = {
        index: matrix_ns(sizes.matrices[index], sizes.cost, len(sizes.owners[index]))
        for index in indices
    }
    count = (settings.num_buckets or _num_buckets(load_ns, sizes)) if indices else 0
    while True:
        buckets = _fill_buckets(load_ns, sizes, count)
        order = PlanOrder(len(buckets), sizes.has_replicas)
        num_bytes = _bytes_of_fullest(sizes.staging(buckets, local, order).values())
        if (
            num_bytes <= settings.staging_bytes
            or len(buckets) == len(indices)
            or 2 * count > _MAX_FOR_MEMORY
        ):
            return Buckets(tuple(buckets), order, num_bytes)
        count *= 2


def _num_buckets(load_ns: Mapping[int, int], sizes: SizeCounter) -> int:
    """Return the number of buckets: the time of the busiest owner over the shortest bucket."""
    ranks = sizes.matrices[min(load_ns)].ranks
    shortest_ns = 2 * sizes.cost.collective_ns(ranks) / _MAX_OVERHEAD
    load_by_owner: Counter[int] = Counter()
    for index, time_ns in load_ns.items():
        for owner in sizes.owners[index]:
            load_by_owner[owner] += time_ns
    shortest_ns = max(1, shortest_ns, *load_ns.values())
    return max(1, min(_MAX_BUCKETS, round(max(load_by_owner.values()) / shortest_ns)))


@dataclass
class _Draft:
    """A bucket while it is filled."""

    matrices: list[int] = field(default_factory=list)
    load_ns: Counter[int] = field(default_factory=Counter)
    num_same_layout: Counter[Hashable] = field(default_factory=Counter)


def _fill_buckets(
    load_ns: Mapping[int, int], sizes: SizeCounter, count: int
) -> list[tuple[int, ...]]:
    """Assign matrices, longest first, to the buckets with the least load on their owners.

    Ties go to the bucket with the fewest matrices of the same layout: then no bucket has all
    matrices of a shape, and its few holders would send all rows of the bucket. There are at most
    as many buckets as matrices.
    """
    drafts = [_Draft() for _ in range(count)]
    for index in sorted(load_ns, key=lambda index: (-load_ns[index], index)):
        matrix, owners = sizes.matrices[index], sizes.owners[index]
        # The first and the last shard are enough: this only decides ties.
        layout = matrix.blocks, matrix.regions[0].holders, matrix.regions[-1].holders
        draft = min(
            drafts,
            key=lambda draft: (
                max(draft.load_ns[owner] for owner in owners),
                draft.num_same_layout[layout],
            ),
        )
        draft.matrices.append(index)
        draft.num_same_layout[layout] += 1
        for owner in owners:
            draft.load_ns[owner] += load_ns[index]
    # The shortest bucket first, so that work starts early.
    return [tuple(sorted(draft.matrices)) for draft in reversed(drafts) if draft.matrices]


def _bytes_of_fullest(stagings: Iterable[PlanStaging]) -> int:
    """Return the staging bytes of the fullest rank, as its engine allocates them."""
    num_bytes = 0
    # Without repetitions: most ranks stage the same.
    totals = [(sum(map(aligned_size, staging.buffers())), staging) for staging in set(stagings)]
    for total, staging in sorted(totals, key=lambda pair: -pair[0]):
        # Ranks that need less even without sharing are not laid out.
        if total > num_bytes:
            num_bytes = max(num_bytes, StagingLayout.build([staging]).num_bytes)
    return num_bytes
