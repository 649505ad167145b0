# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare what a plan moves with the least that any choice of owners could.

    .venv/bin/python benchmarks/traffic_bound.py --preset deepseek-v3 --dp 512 --ep 64

"Lower bound" of the plan report lets the largest holder own each matrix, whatever load that makes.
Here no rank may have more load than the busiest one of the plan, or ``--load`` times that. Matrices
may be shared out over ranks in fractions, which only lowers the result: a transport problem, solved
by the network simplex of networkx. Matrices that the plan splits stay where they are.

Integers only: no GPU, no torch, no ranks.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import networkx

from megatron_muon.plan import ExchangePlan, ExchangeSettings
from megatron_muon.plan.assignment import matrix_seconds
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import Machine, Parallelism, simulate

# Costs are whole numbers: elements for each nanosecond of load, times this.
_COST_SCALE = 10**9


class Moved(NamedTuple):
    """Elements that owners receive, of the matrices of one kind that are not split.

    Args:
        num_matrices: Matrices.
        plan: Elements that the plan moves.
        least: The least with no more load on any rank than is allowed.
        largest_holder: With the largest holder as the owner of each.
    """

    num_matrices: int
    plan: int
    least: int
    largest_holder: int


def moved_by(plans: Sequence[ExchangePlan], load: float = 1.0) -> Iterator[Moved]:
    """Yield a row for each kind: first experts, then dense matrices.

    Args:
        plans: Plans of a job.
        load: The most that a rank may have, relative to the plan's busiest.
    """
    most_s = load * max(seconds for plan in plans for seconds in plan.assignment.load_s.values())
    kinds: dict[bool, list[ExchangePlan]] = {}
    for plan in plans:
        kinds.setdefault(".experts." in plan.matrices[0].fqn, []).append(plan)
    for of_kind in kinds.values():
        rows = [_moved_in_domain(plan, most_s) for plan in of_kind]
        yield Moved(*(sum(column) for column in zip(*rows, strict=True)))


def _moved_in_domain(plan: ExchangePlan, most_s: float) -> Moved:
    # What else ranks have to do: other kinds, and matrices that are split.
    room_s = {rank: most_s - seconds for rank, seconds in plan.assignment.load_s.items()}
    alike: dict[tuple[int, int], list[MatrixLayout]] = {}
    moved = largest_holder = 0
    for matrix, owners in zip(plan.matrices, plan.owners, strict=True):
        if len(owners) > 1:
            continue
        room_s[owners[0]] += matrix_seconds(matrix, plan.cost)
        moved += matrix.num_elements - matrix.elements_by_rank.get(owners[0], 0)
        largest_holder += matrix.num_elements - max(matrix.elements_by_rank.values())
        # All layers of a kind have one tiling.
        alike.setdefault((id(matrix.regions), id(matrix.ranks)), []).append(matrix)
    num_matrices = sum(map(len, alike.values()))
    least = _least_moved(list(alike.values()), room_s, plan)
    return Moved(num_matrices, moved, least, largest_holder)


def _least_moved(
    alike: Sequence[Sequence[MatrixLayout]], room_s: dict[int, float], plan: ExchangePlan
) -> int:
    """Return the least elements that owners receive, shared out in fractions.

    Args:
        alike: Lists of matrices that lie alike.
        room_s: Seconds of load that each rank may take.
        plan: Has the cost model.
    """
    graph = networkx.DiGraph()
    supply: Counter[str] = Counter()
    for number, matrices in enumerate(alike):
        matrix = matrices[0]
        load_ns = max(1, round(matrix_seconds(matrix, plan.cost) * 1e9))
        supply[f"matrices {number}"] = load_ns * len(matrices)
        for rank in matrix.ranks:
            received = matrix.num_elements - matrix.elements_by_rank.get(rank, 0)
            # Rounded down: it stays a lower bound.
            graph.add_edge(f"matrices {number}", rank, weight=received * _COST_SCALE // load_ns)
    for rank, seconds in room_s.items():
        # Rounding of loads must not leave a matrix without a place.
        graph.add_edge(rank, "all", capacity=math.ceil(seconds * 1e9) + _slack_ns(alike))
    for name, amount in supply.items():
        graph.nodes[name]["demand"] = -amount
    graph.add_node("all", demand=supply.total())
    cost, _ = networkx.network_simplex(graph)
    return int(cost) // _COST_SCALE


def _slack_ns(alike: Sequence[Sequence[MatrixLayout]]) -> int:
    """Return the nanoseconds that rounding may add to the load of one rank."""
    return sum(map(len, alike))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument(
        "--load", type=float, default=1.0, help="most load of a rank, of the plan's busiest"
    )
    options = parser.parse_args(arguments)
    if options.load < 1:
        parser.error(f"--load: expected 1 or more, got {options.load}. The plan itself has 1.")
    parallel = Parallelism(dp=options.dp, ep=options.ep)
    simulation = simulate(PRESETS[options.preset], parallel, Machine(), ExchangeSettings())
    rows = list(moved_by(simulation.plans, options.load))
    total = Moved(*(sum(column) for column in zip(*rows, strict=True)))
    print(
        "| matrices | M elements moved | least with these loads | plan / least | largest holder "
        "owns | least / largest holder |\n| ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for row in (*rows, total):
        print(
            f"| {row.num_matrices:,} | {row.plan / 1e6:,.0f} | {row.least / 1e6:,.0f} | "
            f"{row.plan / max(1, row.least):.2f} | {row.largest_holder / 1e6:,.0f} | "
            f"{row.least / max(1, row.largest_holder):.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
