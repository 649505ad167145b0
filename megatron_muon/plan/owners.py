# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The owners of every matrix: one function of the layouts, the same on every rank.

A matrix that alone exceeds the fair share of a rank, the mean load, is split over several owners.
Then one pass goes over all matrices, whole ones of one rank first, then by descending number of
owners, then by descending time. A rank that holds rows of a matrix gets it while its load stays
within a capacity, slightly above the mean; of several such ranks, the rank that receives the fewest
elements. If there is none, the matrix goes to the rank with the least load. A split matrix goes to
consecutive ranks with the least load, whether they hold rows or not.

If every matrix has one holder, such as experts that are sharded as a batch, all of them stay unless
a balanced load saves more than the collectives of an exchange cost.

Rejected: the largest holder owns. It moves the fewest bytes, but a layout repeats in every layer,
so the largest holders would be the same few ranks. Two passes, the first for the capacity: a step
was 2 % shorter at most. Loads of a rank's other plans: a step of 14 jobs was 5 % shorter at most,
0.2 % of an iteration.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, Ranks
from megatron_muon.plan.settings import PlanSettings

# Holders may be loaded by this factor above the mean, or above the longest matrix: estimates are
# not more exact. In plans of 14 jobs lower factors needed up to 1.4 times the staging memory, and
# with 1.05 a step was up to 6 % longer.
_CAPACITY = 1.0375
# A matrix is split while it alone exceeds the fair share of a rank by the first factor, and while
# that shortens it to at most the second. Without splitting, a step of 8B on 512 ranks is predicted
# to take five times as long.
_LONGER_THAN_FAIR = 1.05
_WORTH_SPLITTING = 0.9
# It is split only while the mean load is below this fraction of it: other matrices then fit beside
# its parts. Without this rule, a step of 8B on 512 ranks was predicted to take 23 % longer.
_SPARSE = 0.75


def choose_owners(matrices: Sequence[MatrixLayout], settings: PlanSettings) -> tuple[Ranks, ...]:
    """Return the owners by matrix, listed in the same order on every rank; several if split."""
    cost = settings.cost
    ranks = sorted(set().union(*{matrix.ranks for matrix in matrices}))
    whole_ns = [matrix_ns(matrix, cost) for matrix in matrices]
    if all(len(matrix.elements_by_rank) == 1 for matrix in matrices):
        load_ns: Counter[int] = Counter()
        for matrix, time_ns in zip(matrices, whole_ns, strict=True):
            load_ns.update(dict.fromkeys(matrix.elements_by_rank, time_ns))
        # Norms, gather and scatter; a plan without an exchange has none of them.
        saved_ns = max(load_ns.values()) - load_ns.total() // len(ranks)
        if saved_ns <= 3 * cost.collective_ns(ranks):
            return tuple(tuple(matrix.elements_by_rank) for matrix in matrices)
    num_parts = _choose_parts(matrices, whole_ns, len(ranks), settings)
    part_ns = [matrix_ns(m, cost, parts) for m, parts in zip(matrices, num_parts, strict=True)]
    total_ns = sum(ns * parts for ns, parts in zip(part_ns, num_parts, strict=True))
    loads = _RankLoads(ranks, int(_CAPACITY * max(total_ns // len(ranks), *part_ns)))
    owners: list[Ranks] = [()] * len(matrices)
    # Whole matrices of one rank come first: only there they cause no traffic. Then most owners:
    # later there might be no set of consecutive ranks that are all idle.
    for i in sorted(
        range(len(matrices)),
        key=lambda i: (len(matrices[i].elements_by_rank) > 1, -num_parts[i], -part_ns[i], i),
    ):
        owners[i] = loads.assign(matrices[i], num_parts[i], part_ns[i])
    return tuple(owners)


def matrix_ns(matrix: MatrixLayout, cost: CostModel, num_parts: int = 1) -> int:
    """Estimate the Newton-Schulz time of all blocks of a matrix on an owner.

    Owners of a split matrix are consecutive ranks of its domain. If the first such set spans nodes,
    as under tensor parallelism, all sets are assumed to span nodes.
    """
    on_node = cost.is_on_one_node(matrix.ranks[:num_parts])
    return sum(cost.newton_schulz_ns(*shape, num_parts, on_node=on_node) for shape in matrix.blocks)


class _RankLoads:
    """Load of every rank while matrices are assigned, one by one.

    Args:
        ranks: Ranks of the domain.
        capacity_ns: Maximum load for holders of a matrix to be preferred.
    """

    def __init__(self, ranks: Sequence[int], capacity_ns: int) -> None:
        self._load_ns = dict.fromkeys(ranks, 0)
        self._capacity_ns = capacity_ns
        self._received = dict.fromkeys(ranks, 0)  # elements, by owner
        self._queues: dict[tuple[Ranks, int], list[tuple[int, Ranks]]] = {}

    def assign(self, matrix: MatrixLayout, num_parts: int, part_ns: int) -> Ranks:
        """Choose the owners of a matrix, and add to their loads."""
        held = matrix.elements_by_rank
        limit_ns = self._capacity_ns - part_ns
        fitting = [rank for rank in held if self._load_ns[rank] <= limit_ns]
        if fitting and num_parts == 1:
            # Few ranks hold the matrices of a shape. If only the rows of this matrix counted, they
            # would all go to the same ranks. Llama-3-70B with 8 tensor-parallel ranks on 128 ranks
            # in two instances: a predicted step of 35 ms, otherwise 75.
            best = min(fitting, key=lambda rank: (self._received[rank] - held[rank], rank))
            owners: Ranks = (best,)
        else:
            owners = self._least_loaded(matrix.ranks, num_parts)
        for rank in owners:
            self._load_ns[rank] += part_ns
            self._received[rank] += (matrix.num_elements - held.get(rank, 0)) // num_parts
        return owners

    def _least_loaded(self, ranks: Ranks, num_parts: int) -> Ranks:
        """Return the consecutive ranks whose longest load so far is the least."""
        queue = self._queues.get((ranks, num_parts))
        if queue is None:
            # Sets tile nodes. Rejected: give ties to the largest holders, which sends at most
            # 2 % less.
            firsts = range(0, len(ranks) - num_parts + 1, num_parts)
            sets = [ranks[first : first + num_parts] for first in firsts]
            queue = self._queues[ranks, num_parts] = [(self._longest(s), s) for s in sets]
            heapq.heapify(queue)
        # Loads only grow, so an outdated entry is at the top too early, never too late.
        while queue[0][0] != (load_ns := self._longest(queue[0][1])):
            heapq.heapreplace(queue, (load_ns, queue[0][1]))
        return queue[0][1]

    def _longest(self, ranks: Ranks) -> int:
        return max(self._load_ns[rank] for rank in ranks)


def _choose_parts(
    matrices: Sequence[MatrixLayout],
    whole_ns: Sequence[int],
    num_ranks: int,
    settings: PlanSettings,
) -> list[int]:
    """Choose the number of owners of every matrix: one, unless it exceeds the fair share.

    The longest is split first, while it is so much longer than the mean load that others fit beside
    its parts. Every part repeats the cubic term of its matrix, so splitting more would cost more
    than it balances.
    """
    num_parts = [1] * len(matrices)
    total_ns = sum(whole_ns)
    max_whole_ns = int(_LONGER_THAN_FAIR * (total_ns // num_ranks))
    longest = [(-time_ns, index) for index, time_ns in enumerate(whole_ns)]
    heapq.heapify(longest)
    while longest and -longest[0][0] > max_whole_ns:
        now_ns, index = -longest[0][0], heapq.heappop(longest)[1]
        parts = num_parts[index]
        # Parts double, so that sets of owners tile a node.
        if 2 * parts > min(settings.max_owners, len(matrices[index].ranks)):
            continue
        half_ns = matrix_ns(matrices[index], settings.cost, 2 * parts)
        added_ns = parts * (2 * half_ns - now_ns)
        is_sparse = total_ns + added_ns <= num_ranks * now_ns * _SPARSE
        if half_ns <= _WORTH_SPLITTING * now_ns and is_sparse:
            num_parts[index] = 2 * parts
            total_ns += added_ns
            heapq.heappush(longest, (-half_ns, index))
    return num_parts
