# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare ways to decide who orthogonalizes what, for a model that is not running.

    .venv/bin/python benchmarks/design_alternatives.py --preset llama3-8b --dp 64

Integers only: no GPU, no torch, no ranks. Every design gets the shards of Megatron-FSDP.
Elements are counted without padding; scattered results count as sent.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_muon.plan import ExchangePlan, ExchangeSettings
from megatron_muon.plan.assignment import matrix_seconds
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import (
    Machine,
    Parallelism,
    Simulation,
    simulate,
    simulate_shard_map,
)
from megatron_muon.plan.report import build_report

type Load = Mapping[int, float]
# The ranks that orthogonalize a matrix, given what each has to do so far.
type Choice = Callable[[MatrixLayout, Load], Sequence[int]]


class Row(NamedTuple):
    """One design.

    Args:
        design: Its name.
        num_working: Ranks that orthogonalize something.
        over_ideal: Newton-Schulz time of the busiest rank over that of all matrices spread evenly.
        newton_schulz_ms: Newton-Schulz time of the busiest rank.
        moved: Elements that owners receive, of the elements of all matrices.
        sent: Elements that a rank sends in gathers and scatters, mean.
    """

    design: str
    num_working: int
    over_ideal: float
    newton_schulz_ms: float
    moved: float
    sent: float


def everyone(matrix: MatrixLayout, load: Load) -> Sequence[int]:
    """Gather each matrix to all ranks of its group."""
    return matrix.ranks


def everyone_where_sharded(matrix: MatrixLayout, load: Load) -> Sequence[int]:
    """Gather matrices that lie on several ranks to all ranks; leave the others in place."""
    return list(matrix.elements_by_rank) if len(matrix.elements_by_rank) == 1 else matrix.ranks


def largest_holder(matrix: MatrixLayout, load: Load) -> Sequence[int]:
    """Assign each matrix to the rank that holds most of it, the first of equal ones."""
    held = matrix.elements_by_rank
    return [max(sorted(held), key=held.__getitem__)]


def idlest_holder(matrix: MatrixLayout, load: Load) -> Sequence[int]:
    """Assign each matrix to the holder with the least load."""
    return [min(sorted(matrix.elements_by_rank), key=load.__getitem__)]


def idlest_rank(matrix: MatrixLayout, load: Load) -> Sequence[int]:
    """Assign each matrix to the rank of its group with the least load, holder or not."""
    return [min(matrix.ranks, key=load.__getitem__)]


DESIGNS: dict[str, Choice] = {
    "gather everything to all": everyone,
    "gather boundary matrices to all": everyone_where_sharded,
    "largest holder": largest_holder,
    "idlest holder, longest first": idlest_holder,
    "idlest rank, longest first": idlest_rank,
}


def _place(name: str, choose: Choice, simulation: Simulation) -> Row:
    """Place the matrices of all domains in turn: those whole on a rank first, then the longest."""
    load = dict.fromkeys(range(simulation.world_size), 0.0)
    sent: Counter[int] = Counter()
    elements = moved = 0
    total_s = 0.0
    for plan in simulation.plans:
        seconds = [matrix_seconds(matrix, plan.cost) for matrix in plan.matrices]
        held = [matrix.elements_by_rank for matrix in plan.matrices]
        for i in sorted(range(len(seconds)), key=lambda i: (len(held[i]) > 1, -seconds[i], i)):
            owners = choose(plan.matrices[i], load)
            elements += plan.matrices[i].num_elements
            total_s += seconds[i]
            for holder, num_elements in held[i].items():
                sent[holder] += num_elements * (len(owners) - (holder in owners))
            for owner in owners:
                load[owner] += seconds[i]
                received = plan.matrices[i].num_elements - held[i].get(owner, 0)
                moved += received
                # Where all ranks orthogonalize, each has its rows already.
                sent[owner] += received if len(owners) == 1 else 0
    world = simulation.world_size
    busiest = max(load.values())
    return Row(
        name,
        sum(seconds > 0 for seconds in load.values()),
        busiest * world / total_s,
        busiest * 1e3,
        moved / elements,
        sent.total() / world,
    )


def _of_plans(name: str, plans: Sequence[ExchangePlan], world: int) -> Row:
    """Return the row of a run's own design, from the plan report."""
    report = build_report(range(world), plans)
    return Row(
        name,
        sum(rank.load_s > 0 for rank in report.ranks),
        report.busiest_over_ideal,
        report.busiest_s * 1e3,
        report.moved_elements / report.num_elements,
        sum(rank.elements_sent for rank in report.ranks) / world,
    )


def compare(
    simulate_with: Callable[[ExchangeSettings], Simulation], settings: ExchangeSettings
) -> Iterator[Row]:
    """Yield a row for each design: those that are not built, then those of this package.

    Args:
        simulate_with: Plans the job.
        settings: At most 8 parts.
    """
    whole = simulate_with(replace(settings, max_parts=1))
    for name, choose in DESIGNS.items():
        yield _place(name, choose, whole)
    yield _of_plans("joint, --max-parts 1", whole.plans, whole.world_size)
    split = simulate_with(settings)
    yield _of_plans(f"joint, --max-parts {settings.max_parts}", split.plans, split.world_size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b")
    parser.add_argument("--shards", type=Path, metavar="FILE", help="a map of row shards instead")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--ep", type=int, default=1)
    options = parser.parse_args(arguments)
    parallel = Parallelism(dp=options.dp, ep=options.ep)

    def simulate_with(settings: ExchangeSettings) -> Simulation:
        """Plan the job of the command line."""
        if options.shards is not None:
            return simulate_shard_map(options.shards, Machine(), settings)
        return simulate(PRESETS[options.preset], parallel, Machine(), settings)

    print(
        "| design | ranks with work | busiest / ideal | Newton-Schulz ms, busiest | "
        "elements moved | M elements sent a rank |\n| --- | --- | --- | --- | --- | --- |"
    )
    for row in compare(simulate_with, ExchangeSettings()):
        print(
            f"| {row.design} | {row.num_working} | {row.over_ideal:.2f} | "
            f"{row.newton_schulz_ms:.1f} | {row.moved:.1%} | {row.sent / 1e6:.1f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
