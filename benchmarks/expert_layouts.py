# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What one planner does with layouts for which others have a path of code each.

    .venv/bin/python benchmarks/expert_layouts.py

The cases are those of xtuner's Muon (https://github.com/InternLM/xtuner/pull/1716): a weight of
2048 columns, or experts of 2048 x 768, sharded by rows over W ranks. Its traffic is computed by the
formulas of its paths: all-gather within the ranks of an expert, all-to-all padded to equal shards,
all-gather and reduce-scatter of a remainder. Ours is counted in the plan. No process group, no GPU;
rates are the planner's defaults of a GPU.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_muon.fsdp2.batches import SplitSizes, matrices_of
from megatron_muon.plan.assignment import assignments
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.rank_plan import RankPlan
from megatron_muon.plan.settings import ExchangeSettings

WIDTH, EXPERT_ROWS, EXPERT_COLS = 2048, 2048, 768


class Case(NamedTuple):
    """Parameters of one layout.

    Args:
        name: What is special about it.
        path: What xtuner does with it.
        shapes: Of the parameters.
        split_sizes: Number of experts of each.
        theirs: Elements that a rank of xtuner's sends, the most of any.
    """

    name: str
    path: str
    shapes: list[tuple[int, int]]
    split_sizes: SplitSizes
    theirs: float


def cases(num_ranks: int) -> Iterator[Case]:
    """Yield the cases for a number of ranks."""
    sent = (num_ranks - 1) / num_ranks
    expert = EXPERT_ROWS * EXPERT_COLS
    square = WIDTH * WIDTH
    padded = -(-(WIDTH + 1) // num_ranks) * num_ranks * WIDTH
    experts = 16 * num_ranks
    yield Case(
        "fused, whole experts on each rank",
        "local",
        [(experts * EXPERT_ROWS, EXPERT_COLS)] * 4,
        experts,
        0,
    )
    half = num_ranks // 2
    yield Case(
        "fused, two ranks hold an expert",
        "all-gather of the pair; both orthogonalize",
        [(half * EXPERT_ROWS, EXPERT_COLS)] * 3,
        half,
        3 * expert / 2,
    )
    yield Case(
        "as many matrices as ranks, twice",
        "all-to-all",
        [(WIDTH, WIDTH)] * (2 * num_ranks),
        None,
        4 * sent * square,
    )
    yield Case(
        "the same, 2049 rows",
        "all-to-all, padded",
        [(WIDTH + 1, WIDTH)] * (2 * num_ranks),
        None,
        4 * sent * padded,
    )
    yield Case(
        "fewer matrices than ranks",
        "all-gather, reduce-scatter",
        [(WIDTH, WIDTH)] * (half - 1),
        None,
        2 * (half - 1) * sent * square,
    )
    yield Case(
        "the same, 2049 rows",
        "all-to-all, padded; zeros on idle ranks",
        [(WIDTH + 1, WIDTH)] * (half - 1),
        None,
        2 * sent * padded,
    )
    fused = -(-(half + 1) * EXPERT_ROWS // num_ranks) * num_ranks * EXPERT_COLS
    yield Case(
        "fused, experts that divide neither way",
        "all-to-all of whole fused weights, padded",
        [((half + 1) * EXPERT_ROWS, EXPERT_COLS)] * 3,
        half + 1,
        2 * sent * fused,
    )


def layouts(case: Case, num_ranks: int) -> list[MatrixLayout]:
    """Return the matrices of a case, cut by ``torch.chunk``."""
    found: list[MatrixLayout] = []
    for number, (rows, cols) in enumerate(case.shapes):
        chunks = torch.arange(rows).chunk(num_ranks)
        ends = [0, *itertools.accumulate(len(chunk) for chunk in chunks)]
        ends += [rows] * (num_ranks + 1 - len(ends))
        boxes = {rank: ((ends[rank], ends[rank + 1]), (0, cols)) for rank in range(num_ranks)}
        param = torch.empty(rows, cols, device="meta")
        domain = tuple(range(num_ranks))
        name = f"{case.name} {number}"
        found += [
            matrix
            for matrix, _ in matrices_of(name, param, boxes, domain, case.split_sizes, False, 0)
        ]
    return found


class Plan(NamedTuple):
    """What a plan comes to.

    Args:
        num_matrices: Matrices that are orthogonalized.
        num_local: Those of which nothing travels.
        num_buckets: Rounds of messages.
        sent: Elements that a rank sends, the most of any.
        num_owners: Ranks that orthogonalize.
        balance: Busiest rank over the mean.
    """

    num_matrices: int
    num_local: int
    num_buckets: int
    sent: int
    num_owners: int
    balance: float


def plan(matrices: Sequence[MatrixLayout], num_ranks: int) -> Plan:
    """Plan matrices of one domain, none split over ranks."""
    cost, wire = CostModel(), ExchangeSettings().wire_for(is_bf16=True)
    assignment, *_ = assignments(matrices, cost, wire, max_parts=1)
    built = ExchangePlan.build(
        matrices,
        assignment,
        cost,
        wire,
        staging_bytes=ExchangeSettings().wanted_staging_bytes,
        is_limit=False,
    )
    sent = [
        sum(
            sum(r.num_elements for to, routes in messages.items() if to != rank for r in routes)
            for bucket in RankPlan.build(built, rank).buckets
            for messages in (each.sends for each in (*bucket.gathers, *bucket.scatters))
        )
        for rank in range(num_ranks)
    ]
    loads = assignment.load_s.values()
    return Plan(
        len(matrices),
        len(built.local),
        len(built.buckets),
        max(sent),
        len({owner for owners in assignment.owners for owner in owners}),
        max(loads) / (sum(loads) / num_ranks),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    options = parser.parse_args()
    for num_ranks in options.ranks:
        print(f"{num_ranks} ranks; million elements that a rank sends, the most of any\n")
        print("| layout | xtuner | sends | here: matrices, local, buckets | sends | owners |")
        print("| --- | --- | --- | --- | --- | --- |")
        every: list[MatrixLayout] = []
        for case in cases(num_ranks):
            matrices = layouts(case, num_ranks)
            every += matrices
            _print(case.name, case.path, f"{case.theirs / 1e6:.1f}", plan(matrices, num_ranks))
        found = plan(every, num_ranks)
        _print("all of them at once", "one after the other", "", found)
        print(f"\nall at once: the busiest rank has {found.balance:.2f} of the mean\n")


def _print(name: str, path: str, theirs: str, found: Plan) -> None:
    counts = f"{found.num_matrices}, {found.num_local}, {found.num_buckets}"
    print(
        f"| {name} | {path} | {theirs} | {counts} | {found.sent / 1e6:.1f} | {found.num_owners} |"
    )


if __name__ == "__main__":
    main()
