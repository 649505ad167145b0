# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The owners of every matrix: one function of the layouts, the same on every rank.

A matrix that alone exceeds the fair share of a rank, the mean load, is split over several owners.
Then one pass goes over all matrices, whole ones of one rank first, then by descending number of
owners, then by descending time. A rank that holds rows of a matrix gets it while its load stays
within a capacity, slightly above the mean; of several such ranks, the rank that receives the fewest
elements. If there is none, the matrix goes to the rank with the least load. A split matrix goes to
consecutive ranks with the least load, whether they hold rows or not.

Where every matrix is whole on one rank, as experts may be, all of them stay unless the busiest rank
gains more than the latency of the exchange: without one there are no collectives.

Rejected: the largest holder owns. It moves the fewest bytes, but a layout repeats in every layer,
so the largest holders would be the same few ranks. Two passes, the first for the capacity: a step
was 2 % shorter at most.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
# A matrix is split over more ranks than are free only while the mean load is below this fraction
# of its time: other matrices then fit beside its parts. Without this rule, a step of 70B on 256
# ranks was predicted to take 42 % longer.
_SPARSE = 0.75


class Assignment(NamedTuple):
    """Owners of a list of matrices.

    Args:
        owners: Ranks of the job by matrix; several for a split matrix.
        load_ns: By rank, Newton-Schulz of its matrices, the initial load included.
    """

    owners: tuple[Ranks, ...]
    load_ns: Mapping[int, int]


def choose_owners(
    matrices: Sequence[MatrixLayout],
    settings: PlanSettings,
    initial_load_ns: Mapping[int, int],
) -> Assignment:
    """Choose the owners of matrices, listed in the same order on every rank.

    ``initial_load_ns`` is the time that ranks spend on the matrices of other plans.
    """
    cost = settings.cost
    ranks = sorted(set().union(*{matrix.ranks for matrix in matrices}))
    load_ns = {rank: initial_load_ns.get(rank, 0) for rank in ranks}
    whole_ns = [matrix_ns(matrix, cost) for matrix in matrices]
    before_ns = sum(load_ns.values()) // len(ranks)
    fair_ns = before_ns + sum(whole_ns) // len(ranks)
    room_ns = int(_LONGER_THAN_FAIR * fair_ns) - before_ns
    num_parts = _choose_parts(matrices, whole_ns, room_ns, len(ranks), settings)
    part_ns = [matrix_ns(m, cost, parts) for m, parts in zip(matrices, num_parts, strict=True)]
    total_ns = sum(ns * parts for ns, parts in zip(part_ns, num_parts, strict=True))
    placing = _Placing(load_ns, int(_CAPACITY * max(before_ns + total_ns // len(ranks), *part_ns)))
    owners: list[Ranks] = [()] * len(matrices)
    # Whole matrices of one rank come first: only there they cause no traffic. Then most owners:
    # later there might be no set of consecutive ranks that are all idle.
    for i in sorted(
        range(len(matrices)),
        key=lambda i: (len(matrices[i].elements_by_rank) > 1, -num_parts[i], -part_ns[i], i),
    ):
        owners[i] = placing.place(matrices[i], num_parts[i], part_ns[i])
    if all(len(matrix.elements_by_rank) == 1 for matrix in matrices):
        # There and back, and the all-reduce of norms.
        num_collectives = 2 + (settings.dtypes.norm_bytes > 0)
        exchange_ns = num_collectives * cost.collective_ns(ranks)
        holders = tuple(tuple(matrix.elements_by_rank) for matrix in matrices)
        for (holder,), time_ns in zip(holders, whole_ns, strict=True):
            load_ns[holder] += time_ns
        if max(load_ns.values()) <= max(placing.load_ns.values()) + exchange_ns:
            return Assignment(holders, load_ns)
    return Assignment(tuple(owners), placing.load_ns)


def matrix_ns(matrix: MatrixLayout, cost: CostModel, num_parts: int = 1) -> int:
    """Estimate the Newton-Schulz time of all blocks of a matrix on an owner.

    Owners of a split matrix are consecutive ranks of its domain. If the first such set spans nodes,
    as under tensor parallelism, all sets are assumed to span nodes.
    """
    on_node = cost.is_on_one_node(matrix.ranks[:num_parts])
    return sum(cost.newton_schulz_ns(*shape, num_parts, on_node=on_node) for shape in matrix.blocks)


class _Placing:
    """Load of every rank while matrices are placed, one by one.

    Args:
        load_ns: Load before any matrix is placed.
        capacity_ns: Maximum load for holders of a matrix to be preferred.
    """

    def __init__(self, load_ns: Mapping[int, int], capacity_ns: int) -> None:
        self.load_ns = dict(load_ns)
        self._capacity_ns = capacity_ns
        self._received = dict.fromkeys(load_ns, 0)  # elements, by owner
        self._idlest: dict[Ranks, list[tuple[int, int, int]]] = {}

    def place(self, matrix: MatrixLayout, num_parts: int, part_ns: int) -> Ranks:
        """Choose the owners of a matrix."""
        held, ranks = matrix.elements_by_rank, matrix.ranks
        if num_parts > 1:
            # Sets tile nodes. Ties go to the largest holders: their rows stay.
            owners: Ranks = min(
                (ranks[i : i + num_parts] for i in range(0, len(ranks) - num_parts + 1, num_parts)),
                key=lambda owners: (
                    max(self.load_ns[rank] for rank in owners),
                    -sum(held.get(rank, 0) for rank in owners),
                    owners,
                ),
            )
        elif fitting := [r for r in held if self.load_ns[r] + part_ns <= self._capacity_ns]:
            # Few ranks hold the matrices of a shape. If only the rows of this matrix counted, they
            # would all go to the same ranks. Llama-3-70B with 8 tensor-parallel ranks on 128 ranks
            # in two instances: a predicted step of 35 ms, otherwise 75.
            owners = (min(fitting, key=lambda rank: (self._received[rank] - held[rank], rank)),)
        else:
            owners = (self._idlest_rank(ranks),)
        for rank in owners:
            self.load_ns[rank] += part_ns
            self._received[rank] += (matrix.num_elements - held.get(rank, 0)) // num_parts
        return owners

    def _idlest_rank(self, ranks: Ranks) -> int:
        """Return the rank with the least load so far; ties go to the fewest elements received."""
        if ranks not in self._idlest:
            self._idlest[ranks] = [self._load(rank) for rank in ranks]
            heapq.heapify(self._idlest[ranks])
        heap = self._idlest[ranks]
        # Loads only grow: an outdated entry comes too early, never too late.
        while heap[0] != self._load(heap[0][-1]):
            heapq.heapreplace(heap, self._load(heap[0][-1]))
        return heap[0][-1]

    def _load(self, rank: int) -> tuple[int, int, int]:
        return self.load_ns[rank], self._received[rank], rank


def _choose_parts(
    matrices: Sequence[MatrixLayout],
    whole_ns: Sequence[int],
    room_ns: int,
    num_ranks: int,
    settings: PlanSettings,
) -> list[int]:
    """Choose the number of owners of every matrix: one, unless it exceeds the room of a rank.

    The longest is split first. It is split while free ranks remain, or while it is so much longer
    than the mean load that others fit beside its parts. Every part repeats the cubic term of its
    matrix, so splitting more would cost more than it balances.
    """
    num_parts = [1] * len(matrices)
    total_ns, total_parts = sum(whole_ns), len(matrices)
    longest = [(-time_ns, index) for index, time_ns in enumerate(whole_ns)]
    heapq.heapify(longest)
    while longest and -longest[0][0] > room_ns:
        now_ns, index = -longest[0][0], heapq.heappop(longest)[1]
        parts = num_parts[index]
        # Parts double, so that sets of owners tile a node.
        if 2 * parts > min(settings.max_owners, len(matrices[index].ranks)):
            continue
        half_ns = matrix_ns(matrices[index], settings.cost, 2 * parts)
        added_ns = parts * (2 * half_ns - now_ns)
        has_free_ranks = total_parts + parts <= num_ranks
        is_sparse = total_ns + added_ns <= num_ranks * now_ns * _SPARSE
        if half_ns <= _WORTH_SPLITTING * now_ns and (has_free_ranks or is_sparse):
            num_parts[index] = 2 * parts
            total_ns, total_parts = total_ns + added_ns, total_parts + parts
            heapq.heappush(longest, (-half_ns, index))
    return num_parts
