# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The owners of every matrix: one function of the layouts, the same on every rank.

A rank is busy for its compute time, or for the time of its rows and results on its link if that is
longer. A matrix that alone exceeds the fair share of a rank, the mean load, is split over several
owners first. Then two passes go over all matrices: whole ones of one rank first, then by descending
number of owners, then by descending time.

1. Every matrix goes to the rank that is done with it first. This pass only gives the load
   of the busiest rank.
2. All matrices are placed again. A rank that holds rows of a matrix gets it as long as its load
   stays within a capacity, 1.025 times the highest load of pass 1; of several such ranks, the rank
   with the quietest link. If there is none, the matrix goes to the rank that is done with it first.
   A split matrix goes to consecutive ranks, whether they hold rows or not. If a load exceeds the
   capacity in the end, the owners of pass 1 stay.

Where every matrix is whole on one rank, as experts may be, all of them stay unless the busiest rank
gains more than the latency of the exchange: without one there are no collectives.

Rejected: the largest holder owns. It moves the fewest bytes, but a layout repeats in every layer,
so the largest holders would be the same few ranks.
"""

import functools
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, Ranks
from megatron_muon.plan.settings import CommDtypes, PlanSettings

# Pass 2 may load a rank by this factor more than pass 1: estimates are not more exact.
_CAPACITY = 1.025
# A matrix is split while it alone exceeds the fair share of a rank by the first factor, and while
# that shortens it to at most the second. Without splitting, a step of 8B on 512 ranks is predicted
# to take five times as long.
_LONGER_THAN_FAIR = 1.05
_WORTH_SPLITTING = 0.9
# It is split over more ranks than there are free ones only while the mean load is below this
# fraction of it: other matrices then fit beside its parts. Without this rule, a step of 70B on 256
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
    # Layers share their regions, and so the traffic of their matrices.
    traffic_ns: dict[tuple[int, Ranks], Mapping[int, int]] = {}
    tasks = []
    for index, (matrix, parts) in enumerate(zip(matrices, num_parts, strict=True)):
        key = id(matrix.elements_by_rank), matrix.ranks
        if key not in traffic_ns:
            traffic_ns[key] = _traffic_ns(matrix, cost, settings.dtypes)
        tasks.append(_Task(index, matrix, parts, matrix_ns(matrix, cost, parts), traffic_ns[key]))
    # Whole matrices of one rank come first: only there they cause no traffic. Then most owners:
    # later there might be no set of consecutive ranks that are all idle.
    tasks.sort(
        key=lambda t: (len(t.matrix.elements_by_rank) > 1, -t.num_parts, -t.load_ns, t.index)
    )
    first = _Placing(load_ns, capacity_ns=0)
    first.place(tasks)
    capacity_ns = int(_CAPACITY * max(first.load_ns.values()))
    placing = _Placing(load_ns, capacity_ns=capacity_ns)
    placing.place(tasks)
    if max(placing.load_ns.values()) > capacity_ns:
        placing = first
    if all(len(matrix.elements_by_rank) == 1 for matrix in matrices):
        # There and back, and the all-reduce of norms.
        num_collectives = 2 + (settings.dtypes.norm_bytes > 0)
        exchange_ns = num_collectives * cost.collective_ns(ranks)
        holders = tuple(tuple(matrix.elements_by_rank) for matrix in matrices)
        for (holder,), time_ns in zip(holders, whole_ns, strict=True):
            load_ns[holder] += time_ns
        if max(load_ns.values()) <= max(placing.load_ns.values()) + exchange_ns:
            return Assignment(holders, load_ns)
    return Assignment(tuple(placing.owners[i] for i in range(len(tasks))), placing.load_ns)


def matrix_ns(matrix: MatrixLayout, cost: CostModel, num_parts: int = 1) -> int:
    """Estimate the Newton-Schulz time of all blocks of a matrix on an owner.

    Owners of a split matrix are consecutive ranks of its domain. If the first such set spans nodes,
    as under tensor parallelism, all sets are assumed to span nodes.
    """
    on_node = cost.share_a_node(matrix.ranks[:num_parts])
    return sum(cost.newton_schulz_ns(*shape, num_parts, on_node=on_node) for shape in matrix.blocks)


def _traffic_ns(matrix: MatrixLayout, cost: CostModel, dtypes: CommDtypes) -> dict[int, int]:
    """Estimate, by owner, the time of missing rows and of their results over its link."""
    held = matrix.elements_by_rank
    total = sum(held.values())
    # One of several replicas sends, and one gets results: the nearest, here assumed to be an
    # average one.
    element_bytes = (dtypes.gather_bytes + dtypes.scatter_bytes) * matrix.num_elements / total
    by_node: Counter[int] = Counter()
    for rank, elements in held.items():
        by_node[cost.node(rank)] += elements
    return {
        owner: cost.messages_ns(
            round((by_node[cost.node(owner)] - held.get(owner, 0)) * element_bytes),
            round((total - by_node[cost.node(owner)]) * element_bytes),
        )
        for owner in matrix.ranks
    }


@dataclass(frozen=True)
class _Task:
    index: int
    matrix: MatrixLayout
    num_parts: int
    load_ns: int  # on an owner
    traffic_ns: Mapping[int, int]  # by owner, as if it owned the whole matrix

    def part_traffic_ns(self, owner: int) -> int:
        """Estimate the time of rows and results of one part over the link of its owner."""
        return self.traffic_ns[owner] // self.num_parts

    def candidates(self) -> Sequence[Ranks]:
        """Return the holders; for a split matrix sets of consecutive ranks that tile nodes."""
        if self.num_parts == 1:
            return _sets_of_ranks(tuple(self.matrix.elements_by_rank), 1)
        return _sets_of_ranks(self.matrix.ranks, self.num_parts)


@functools.lru_cache(maxsize=64)
def _sets_of_ranks(ranks: Ranks, size: int) -> list[Ranks]:
    return [ranks[i : i + size] for i in range(0, len(ranks) - size + 1, size)]


class _Placing:
    """One pass: owners so far, and the load that they cause.

    Args:
        load_ns: Load of every rank before any matrix is placed.
        capacity_ns: Maximum load for holders of a matrix to be preferred; 0 in pass 1, without
            preference.
    """

    def __init__(self, load_ns: Mapping[int, int], *, capacity_ns: int) -> None:
        self.owners: dict[int, Ranks] = {}
        self.load_ns = dict(load_ns)
        self._link_ns = dict.fromkeys(load_ns, 0)  # rows and results over the link, by owner
        self._capacity_ns = capacity_ns
        self._idlest: dict[Ranks, list[tuple[int, int]]] = {}

    def place(self, tasks: Iterable[_Task]) -> None:
        """Choose owners for all tasks, in order."""
        for task in tasks:
            owners = self._below_capacity(task) or self._first_done(task)
            for rank in owners:
                self.load_ns[rank] += task.load_ns
                self._link_ns[rank] += task.part_traffic_ns(rank)
            self.owners[task.index] = owners

    def _busy_ns(self, rank: int) -> int:
        return max(self.load_ns[rank], self._link_ns[rank])

    def _below_capacity(self, task: _Task) -> Ranks:
        """Return owners within the capacity, preferably with quiet links, or ().

        Few ranks hold the matrices of a shape. If only the traffic of this matrix counted, they
        would all go to the same ranks. Llama-3-70B with 8 tensor-parallel ranks on 128 ranks in
        two instances: a predicted step of 35 ms, otherwise 75.
        """
        fitting = []
        for owners in task.candidates() if self._capacity_ns else ():
            if max(self.load_ns[rank] for rank in owners) + task.load_ns <= self._capacity_ns:
                traffic_ns = sum(map(task.part_traffic_ns, owners))
                if task.num_parts == 1:
                    traffic_ns += self._link_ns[owners[0]]
                fitting.append((traffic_ns, owners))
        return min(fitting)[1] if fitting else ()

    def _first_done(self, task: _Task) -> Ranks:
        """Return the owners that would be done first."""
        candidates = [*task.candidates()]
        if task.num_parts == 1:
            candidates.append((self._idlest_rank(task.matrix.ranks),))

        def done_ns(owners: Ranks) -> tuple[int, int, Ranks]:
            """Return when owners would be done; ties go to the least traffic."""
            traffic_ns = list(map(task.part_traffic_ns, owners))
            busy_ns = (
                max(self.load_ns[rank] + task.load_ns, self._link_ns[rank] + extra_ns)
                for rank, extra_ns in zip(owners, traffic_ns, strict=True)
            )
            return max(busy_ns), sum(traffic_ns), owners

        return min(candidates, key=done_ns)

    def _idlest_rank(self, ranks: Ranks) -> int:
        """Return the rank that is busy for the shortest time so far."""
        if ranks not in self._idlest:
            self._idlest[ranks] = [(self._busy_ns(rank), rank) for rank in ranks]
            heapq.heapify(self._idlest[ranks])
        heap = self._idlest[ranks]
        # Times only grow: an outdated entry comes too early, never too late.
        while heap[0][0] != self._busy_ns(heap[0][1]):
            heapq.heapreplace(heap, (self._busy_ns(heap[0][1]), heap[0][1]))
        return heap[0][1]


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
