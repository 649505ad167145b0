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
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_muon.plan.layout import MatrixLayout, Ranks
from megatron_muon.plan.owners import matrix_ns
from megatron_muon.plan.settings import PlanSettings

# Indices of the matrices by bucket, ascending.
type Buckets = tuple[tuple[int, ...], ...]

# Upper bound: more buckets gain little, as each adds two collectives.
_MAX_BUCKETS = 16
# The two collectives of a bucket may cost this fraction of its work. Measured on 4 CPU ranks with
# small matrices (hidden 128): 147 ms in one bucket, 198 ms in 16.
_MAX_OVERHEAD = 0.1
# Maximum number of buckets while memory is short.
_MAX_FOR_MEMORY = 64


def bucket_choices(
    indices: Sequence[int],
    matrices: Sequence[MatrixLayout],
    owners: Sequence[Ranks],
    settings: PlanSettings,
) -> Iterator[Buckets]:
    """Yield buckets of the exchanged matrices, by the rule first, and then twice as many each time.

    Args:
        indices: The exchanged matrices.
        matrices: All matrices of the plan.
        owners: Owners by matrix.
        settings: Rates of the machine, and the number of buckets if it is given.
    """
    load_ns = {i: matrix_ns(matrices[i], settings.cost, len(owners[i])) for i in indices}
    num_buckets = settings.num_buckets or _num_buckets(load_ns, matrices, owners, settings)
    while True:
        buckets = _fill_buckets(load_ns, matrices, owners, num_buckets)
        yield buckets
        num_buckets *= 2
        if len(buckets) == len(indices) or num_buckets > _MAX_FOR_MEMORY:
            return


def _num_buckets(
    load_ns: Mapping[int, int],
    matrices: Sequence[MatrixLayout],
    owners: Sequence[Ranks],
    settings: PlanSettings,
) -> int:
    """Return the number of buckets: the time of the busiest owner over the shortest bucket."""
    load_by_owner: Counter[int] = Counter()
    for index, time_ns in load_ns.items():
        for owner in owners[index]:
            load_by_owner[owner] += time_ns
    collectives_ns = 2 * settings.cost.collective_ns(matrices[0].ranks)
    shortest_ns = max(1, collectives_ns / _MAX_OVERHEAD, *load_ns.values())
    longest_ns = max(load_by_owner.values(), default=0)
    return max(1, min(_MAX_BUCKETS, round(longest_ns / shortest_ns)))


@dataclass
class _Draft:
    """A bucket while it is filled."""

    matrices: list[int] = field(default_factory=list)
    load_ns: Counter[int] = field(default_factory=Counter)
    num_same_layout: Counter[Hashable] = field(default_factory=Counter)


def _fill_buckets(
    load_ns: Mapping[int, int],
    matrices: Sequence[MatrixLayout],
    owners: Sequence[Ranks],
    num_buckets: int,
) -> Buckets:
    """Assign matrices, longest first, to the buckets with the least load on their owners.

    Ties go to the bucket with the fewest matrices of the same layout: then no bucket has all
    matrices of a shape, and its few holders would send all rows of the bucket. There are at most
    as many buckets as matrices.
    """
    drafts = [_Draft() for _ in range(num_buckets)]
    for index in sorted(load_ns, key=lambda index: (-load_ns[index], index)):
        matrix = matrices[index]
        # The first and the last shard are enough: this only decides ties.
        layout = matrix.blocks, matrix.regions[0].holders, matrix.regions[-1].holders
        draft = min(
            drafts,
            key=lambda draft: (
                max(draft.load_ns[owner] for owner in owners[index]),
                draft.num_same_layout[layout],
            ),
        )
        draft.matrices.append(index)
        draft.num_same_layout[layout] += 1
        for owner in owners[index]:
            draft.load_ns[owner] += load_ns[index]
    # The shortest bucket first, so that work starts early.
    return tuple(tuple(sorted(draft.matrices)) for draft in reversed(drafts) if draft.matrices)
