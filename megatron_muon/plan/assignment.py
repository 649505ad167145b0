# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The owners of every matrix: one function of the layouts, the same on every rank.

Matrices are placed by :class:`~megatron_muon.plan.balance.LoadBalancer` once for each of several
capacities, and the objective picks the best result. Round robin is among them, so the choice is
never worse than round robin. It picks by a rough estimate of a step, so another result may make a
faster plan. One other is returned beside the best.

Rejected: the largest holder owns. It moves the fewest bytes. But a layout repeats in each layer, so
the largest holders are the same few ranks in all of them (docs/performance.md).
"""

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_muon.plan.balance import LoadBalancer, Task
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.wire import Wire

# balance: the lowest load of the busiest rank. joint: the shortest step if half of the traffic of
# the busiest link is hidden. Of nearly equal ones the least traffic decides.
Objective = Literal["joint", "balance"]


@dataclass(frozen=True)
class Thresholds:
    """What counts as equal, and when a matrix is split.

    Args:
        equal_balance: Loads within this factor count as equal, and the least traffic decides.
        equal_step: Steps within this factor count as equal, and the least traffic decides.
        longer_than_fair: A matrix is split while it alone takes a rank above its fair share by more
            than this factor.
        worth_splitting: It is split while doubling its parts shortens it to at most this share.
        sparse: It is split over more ranks than there are free ones only while the mean load is
            below this share of the longest matrix.
    """

    # The rates behind the estimates are not known better. The values were chosen on the plans of
    # docs/performance.md. With an equal_step of 1 the step of Llama-3-70B on 512 ranks in 8
    # instances is predicted to be 2 % longer. With 1.02 no step changes by more than 0.3 %.
    equal_balance: float = 1.01
    equal_step: float = 1.005
    longer_than_fair: float = 1.05
    worth_splitting: float = 0.9
    sparse: float = 0.75


# Capacities to try, relative to the least that is possible: the ideal load, or the longest matrix.
# The excess doubles from 0.6 % to 307 %: fine where balance matters, coarse where traffic decides.
_CAPACITIES = (1.0, *(1 + 0.006 * 2**step for step in range(10)))
# Another result has to promise a step of at most so many times that of the best.
_PROMISING = 1.1
# A rank with this share of the longest load is busy: it has no time to wait for rows.
BUSY_LOAD = 0.95


@dataclass(frozen=True)
class Assignment:
    """Owners of a list of matrices.

    Args:
        owners: Of each matrix, ranks of the job; more than one where it is split.
        load_s: Newton-Schulz seconds by rank, the initial load included.
        ideal_s: Mean of the loads if no matrix were split, seconds.
    """

    owners: tuple[tuple[int, ...], ...]
    load_s: Mapping[int, float]
    ideal_s: float

    def on_ranks(self, rank_of: Mapping[int, int]) -> "Assignment":
        """Put the rank that a mapping names in the place of each."""
        return Assignment(
            tuple(tuple(rank_of[owner] for owner in owners) for owners in self.owners),
            {rank_of[rank]: seconds for rank, seconds in self.load_s.items()},
            self.ideal_s,
        )


def assignments(
    matrices: Sequence[MatrixLayout],
    cost: CostModel,
    wire: Wire,
    *,
    objective: Objective = "joint",
    max_parts: int = 8,
    initial_load_s: Mapping[int, float] | None = None,
    thresholds: Thresholds | None = None,
) -> list[Assignment]:
    """Choose the owners of matrices; beside the best ones maybe others, whose plan may be faster.

    Args:
        matrices: Layouts, in the same order on every rank.
        cost: Rates of the machine.
        wire: Bytes an element takes.
        objective: See :data:`Objective`.
        max_parts: Most owners of one matrix, a power of two; 1 keeps each whole.
        initial_load_s: Seconds that ranks spend on other matrices.
        thresholds: What counts as equal; None for the defaults.

    Raises:
        ValueError: Unknown objective.
    """
    if objective not in get_args(Objective):
        raise ValueError(
            f"objective: expected one of {get_args(Objective)}, got {objective!r}. "
            "Pass one of them."
        )
    thresholds = thresholds or Thresholds()
    # One tuple object for equal sets of possible owners: the balancer compares them by identity.
    eligible = {matrix.ranks: matrix.ranks for matrix in matrices}
    ranks = sorted({rank for possible_owners in eligible for rank in possible_owners})
    load_s = {rank: (initial_load_s or {}).get(rank, 0.0) for rank in ranks}
    whole_s = [matrix_seconds(matrix, cost) for matrix in matrices]
    ideal_s = (sum(load_s.values()) + sum(whole_s)) / max(1, len(ranks))
    room_s = thresholds.longer_than_fair * ideal_s - sum(load_s.values()) / max(1, len(ranks))
    num_parts = _choose_parts(matrices, whole_s, room_s, cost, max_parts, thresholds)
    tasks: list[Task] = []
    # One task for matrices that lie alike, as those of all layers do.
    known: dict[tuple[int, int, int], Task] = {}
    for matrix, n in zip(matrices, num_parts, strict=True):
        key = id(matrix.regions), id(eligible[matrix.ranks]), n
        if key not in known:
            load = matrix_seconds(matrix, cost, n)
            known[key] = Task(matrix, eligible[matrix.ranks], n, load, cost, wire)
        tasks.append(known[key])
    # A baseline that anybody would try first.
    round_robin = LoadBalancer(tasks, load_s)
    round_robin.place_in_turn()
    found = [round_robin]
    least_s = max([ideal_s, *load_s.values(), *(task.load_s for task in tasks)], default=0.0)
    # Filling is greedy, so the last matrices find no room below the capacity and go anywhere. It
    # therefore fills up to the next capacity, and moves matrices down to this one afterwards: that
    # search sees all of them.
    fill_up_to = (*_CAPACITIES[1:], _CAPACITIES[-1])
    for fill, capacity in zip(fill_up_to, _CAPACITIES, strict=True):
        balancer = LoadBalancer(tasks, load_s)
        balancer.fill(fill * least_s)
        balancer.relieve(capacity * least_s)
        balancer.save_traffic(max(capacity * least_s, balancer.busiest_load_s))
        is_cheapest = balancer.is_cheapest
        balancer.relieve_links(capacity * least_s)
        found.append(balancer)
        # A larger capacity could only allow what is already there.
        if is_cheapest:
            break
    best = _choose(found, objective, len(ranks), thresholds)
    other = _less_busy(found, best, len(ranks)) if objective == "joint" else None
    return [
        Assignment(tuple(placed.owners), placed.load_s, ideal_s)
        for placed in (best, other)
        if placed is not None
    ]


def _choose(
    found: Sequence[LoadBalancer], objective: Objective, num_ranks: int, thresholds: Thresholds
) -> LoadBalancer:
    """Return the best result; of nearly equal ones the one with the least traffic.

    The first is round robin.
    """
    best_load_s = min(placed.busiest_load_s for placed in found)
    if objective == "balance":
        capacity_s = min(thresholds.equal_balance * best_load_s, found[0].busiest_load_s)
        near = [placed for placed in found if placed.busiest_load_s <= capacity_s]
        return min(near, key=lambda placed: placed.traffic_s)

    steps_s = [_step_seconds(placed, num_ranks) for placed in found]
    longest_s = thresholds.equal_step * min(steps_s)
    near = [placed for placed, step_s in zip(found, steps_s, strict=True) if step_s <= longest_s]
    return min(near, key=lambda placed: placed.traffic_s)


def _step_seconds(placed: LoadBalancer, num_ranks: int) -> float:
    """Estimate the step if half of what the busiest link carries is hidden."""
    # The mean is the price of bytes: of plans with equal links, that with fewer is better.
    # Predicted steps if all of the busiest link counts: Qwen3-30B on 64 ranks 38 ms in place of 37.
    # If the mean alone does: Llama-3-70B on 512 ranks in 8 instances 114 in place of 112.
    mean_link_s = placed.traffic_s / max(1, num_ranks)
    return placed.busiest_load_s + placed.busiest_link_s / 2 + mean_link_s


def _less_busy(
    found: Sequence[LoadBalancer], best: LoadBalancer, num_ranks: int
) -> LoadBalancer | None:
    """Return the result with the least load, then fewest busy ranks; None if that is the best one.

    More of its traffic may be hidden. Busy ranks are those that cannot wait: the fewer they are,
    the sooner all of them have their first rows, and their last results have left. Two results
    gain nothing more for the plans of docs/performance.md, and planning is long for many ranks.
    """
    longest_s = _PROMISING * _step_seconds(best, num_ranks)

    def loads(placed: LoadBalancer) -> tuple[int, int]:
        """Return the longest load in nanoseconds, which rounding of sums does not change."""
        busiest_s = placed.busiest_load_s
        num_busy = sum(load >= BUSY_LOAD * busiest_s for load in placed.load_s.values())
        return round(busiest_s * 1e9), num_busy

    promising = [placed for placed in found if _step_seconds(placed, num_ranks) <= longest_s]
    other = min(promising, key=loads)
    return other if loads(other) < loads(best) else None


def matrix_seconds(matrix: MatrixLayout, cost: CostModel, num_parts: int = 1) -> float:
    """Estimate the Newton-Schulz seconds of all blocks of a matrix on each of its owners.

    Owners that share a matrix are consecutive ranks of its domain. Where one such set spans nodes,
    as under tensor parallelism, all sets are taken to span nodes.
    """
    is_near = num_parts == 1 or _are_near(matrix.ranks, num_parts, cost.ranks_per_node)
    return sum(
        cost.newton_schulz_seconds(*shape, num_parts, is_near=is_near) for shape in matrix.blocks
    )


# Most matrices have one tuple of ranks, which may be thousands.
@functools.lru_cache(maxsize=256)
def _are_near(ranks: tuple[int, ...], num_parts: int, ranks_per_node: int) -> bool:
    """Return whether each set of consecutive ranks, of so many, is within a node."""
    return all(
        ranks[start] // ranks_per_node == ranks[start + num_parts - 1] // ranks_per_node
        for start in range(0, len(ranks) - num_parts + 1, num_parts)
    )


def _choose_parts(
    matrices: Sequence[MatrixLayout],
    whole_s: Sequence[float],
    room_s: float,
    cost: CostModel,
    max_parts: int,
    thresholds: Thresholds,
) -> list[int]:
    """Choose how many owners split each matrix: one, unless it exceeds the room of a rank.

    The longest is split first. It is split while all parts fit on ranks of their own, or while it
    takes so much longer than the mean load that others fit beside its parts. Each part repeats the
    cubic term of its matrix, so splitting more would cost more than it balances.
    """
    num_parts = [1] * len(matrices)
    num_ranks = len(set().union(*{matrix.ranks for matrix in matrices}))
    total_s, total_parts = sum(whole_s), len(matrices)
    longest = [(-seconds, index) for index, seconds in enumerate(whole_s)]
    heapq.heapify(longest)
    while longest and -longest[0][0] > room_s:
        now_s, index = -longest[0][0], heapq.heappop(longest)[1]
        parts = num_parts[index]
        # Parts double, so that sets of owners tile a node. Of a matrix with copies one copy might
        # be split and another not, and then they would drift apart.
        most_parts = 1 if matrices[index].has_copies else min(max_parts, len(matrices[index].ranks))
        if 2 * parts > most_parts:
            continue
        half_s = matrix_seconds(matrices[index], cost, 2 * parts)
        added_s = parts * (2 * half_s - now_s)
        has_free_ranks = total_parts + parts <= num_ranks
        is_sparse = total_s + added_s <= num_ranks * now_s * thresholds.sparse
        is_worth_it = half_s <= thresholds.worth_splitting * now_s
        if is_worth_it and (has_free_ranks or is_sparse):
            num_parts[index] = 2 * parts
            total_s, total_parts = total_s + added_s, total_parts + parts
            heapq.heappush(longest, (-half_s, index))
    return num_parts
