# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Who orthogonalizes which matrix: one function of the layouts, the same on every rank.

Vocabulary:

==============  ================================================================================
owner           the rank that orthogonalizes a matrix; several where it is cut into equal parts
load            seconds of Newton-Schulz of one rank
capacity        load up to which the owner with the least traffic is taken
objective       ``balance``: the lowest busiest load; ``joint``: the shortest step with no traffic
                hidden, of nearly equal ones the least traffic
==============  ================================================================================

Matrices are placed by :class:`~megatron_muon.plan.balance.Placement` for several capacities, and
the objective chooses; round robin is among them, so that neither balance nor step is worse.

Rejected: the largest holder owns. It moves the fewest bytes, but a layout repeats in each layer, so
the largest holders are the same few ranks in all of them (docs/performance.md).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.plan.balance import Candidate, Placement
from megatron_muon.plan.cost import CostModel, WireBytes
from megatron_muon.plan.layout import MatrixLayout

OBJECTIVES = ("joint", "balance")
# Relative to the least that is possible: the ideal, or the longest matrix.
_CAPACITIES = (1.0, *(1 + 0.006 * 2**step for step in range(10)))
# Estimates are not better than this: loads within 1 %, steps within 3 % count as equal, and the
# least traffic decides; for that no more than 4.5 % of the best balance is given up.
_EQUAL_BALANCE, _EQUAL_STEP, _TRADED_BALANCE = 1.01, 1.03, 1.045
# A matrix is cut while it would take a rank above its fair share by more than this, and while
# doubling the parts makes it shorter by at least a tenth; more parts than ranks only while the mean
# load is below this share of the longest.
_LONGER_THAN_FAIR = 1.05
_WORTH_CUTTING = 0.9
_SPARSE = 0.75


@dataclass(frozen=True)
class Assignment:
    """Owners of a list of matrices.

    Args:
        owners: Of each matrix, ranks of the job; more than one where it is cut into parts.
        load: Seconds of Newton-Schulz by rank, what ranks were busy with before included.
        ideal: Mean of the loads if no matrix were cut, seconds.
    """

    owners: tuple[tuple[int, ...], ...]
    load: Mapping[int, float]
    ideal: float


def assign(
    matrices: Sequence[MatrixLayout],
    cost: CostModel,
    wire: WireBytes,
    *,
    objective: str = "joint",
    max_parts: int = 8,
    busy: Mapping[int, float] | None = None,
) -> Assignment:
    """Choose the owners of matrices.

    Args:
        matrices: Layouts, in the same order on every rank.
        cost: Rates of the machine.
        wire: Bytes an element takes.
        objective: One of :data:`OBJECTIVES`.
        max_parts: Ranks that one matrix may be cut over, a power of two; 1 keeps each whole.
        busy: Seconds that ranks spend on other matrices.

    Raises:
        ValueError: Unknown objective.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: expected one of {OBJECTIVES}, got {objective!r}.")
    domains = {matrix.ranks: matrix.ranks for matrix in matrices}
    ranks = sorted({rank for domain in domains for rank in domain})
    load = {rank: (busy or {}).get(rank, 0.0) for rank in ranks}
    seconds = [matrix_seconds(matrix, cost) for matrix in matrices]
    ideal = (sum(load.values()) + sum(seconds)) / max(1, len(ranks))
    room = _LONGER_THAN_FAIR * ideal - sum(load.values()) / max(1, len(ranks))
    candidates = [
        Candidate(
            matrix,
            domains[matrix.ranks],
            num_parts,
            matrix_seconds(matrix, cost, num_parts),
            cost,
            wire,
        )
        for matrix, num_parts in zip(
            matrices, _parts(matrices, seconds, room, cost, max_parts), strict=True
        )
    ]

    round_robin = Placement(candidates, load)
    round_robin.place_in_turn()
    placements = [round_robin]
    least = max([ideal, *load.values(), *(each.seconds for each in candidates)], default=0.0)
    wider = (*_CAPACITIES[1:], _CAPACITIES[-1])
    for fill_to, capacity in zip(wider, _CAPACITIES, strict=True):
        placement = Placement(candidates, load)
        placement.fill(fill_to * least)
        placement.relieve(capacity * least)
        placement.save_traffic(max(capacity * least, placement.busiest))
        placements.append(placement)
        if placement.is_cheapest:
            break
    best = _choose(placements, objective, len(ranks))
    return Assignment(tuple(best.owners), best.load, ideal)


def _choose(placements: Sequence[Placement], objective: str, num_ranks: int) -> Placement:
    """Return the best placement; of nearly equal ones the one with the least traffic.

    The first is round robin.
    """
    best_balance = min(placement.busiest for placement in placements)
    if objective == "balance":
        limit = min(_EQUAL_BALANCE * best_balance, placements[0].busiest)
        near = [p for p in placements if p.busiest <= limit]
        return min(near, key=lambda p: p.traffic)

    def step(placement: Placement) -> float:
        """Predict the step, no traffic hidden."""
        # A byte moved goes over the links of two ranks.
        return placement.busiest + 2 * placement.traffic / max(1, num_ranks)

    shortest = min(placements, key=step)
    capacity = max(shortest.busiest, _TRADED_BALANCE * best_balance)
    near = [
        p for p in placements if step(p) <= _EQUAL_STEP * step(shortest) and p.busiest <= capacity
    ]
    return min(near, key=lambda p: p.traffic)


def matrix_seconds(matrix: MatrixLayout, cost: CostModel, num_parts: int = 1) -> float:
    """Estimate the time of all blocks of a matrix on each rank it is cut over.

    Sets of ranks that share a matrix are consecutive ranks of its domain; where one set spans
    nodes, as under tensor parallelism, all are taken to.
    """
    starts = range(0, len(matrix.ranks) - num_parts + 1, num_parts) if num_parts > 1 else ()
    is_near = all(cost.share_a_node(matrix.ranks[i : i + num_parts]) for i in starts)
    return sum(
        cost.newton_schulz_seconds(*shape, num_parts, is_near=is_near) for shape in matrix.blocks
    )


def _parts(
    matrices: Sequence[MatrixLayout],
    seconds: Sequence[float],
    room: float,
    cost: CostModel,
    max_parts: int,
) -> list[int]:
    """Choose how many ranks each matrix is cut over: 1 unless it exceeds the room a rank has.

    The longest is cut first, while all parts fit on ranks of their own, or while it takes so much
    longer than the mean load that others fit beside its parts. Each part repeats the cubic term of
    its matrix: cutting more would cost more than it balances.
    """
    num_parts = [1] * len(matrices)
    num_ranks = len(set().union(*{matrix.ranks for matrix in matrices}))
    total, total_parts = sum(seconds), len(matrices)
    longest = [(-whole, index) for index, whole in enumerate(seconds)]
    heapq.heapify(longest)
    while longest and -longest[0][0] > room:
        now, index = -longest[0][0], heapq.heappop(longest)[1]
        parts = num_parts[index]
        if 2 * parts > min(max_parts, len(matrices[index].ranks)):
            continue
        shorter = matrix_seconds(matrices[index], cost, 2 * parts)
        more = parts * (2 * shorter - now)
        has_room = total_parts + parts <= num_ranks or total + more <= num_ranks * now * _SPARSE
        if shorter <= _WORTH_CUTTING * now and has_room:
            num_parts[index] = 2 * parts
            total, total_parts = total + more, total_parts + parts
            heapq.heappush(longest, (-shorter, index))
    return num_parts
