# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare predicted steps with measured ones, on gloo ranks with slowed links and slowed ranks.

    .venv/bin/python benchmarks/step_estimate.py

The engine and its collectives are those of a run. Only time is made up: Newton-Schulz sleeps as
long as the cost model says, and a message is held back until the link of its rank would have
carried it. So the figures show whether the model of plan/step_estimate.py has the order and the
waits of the engine right. They say nothing about how fast a machine is.

Ranks have experts, which some share in twos, and dense matrices. Variants change the schedule (one
bucket; one bucket under way; the rounds of one kind after those of the other; or no dense matrix
before the last expert is done, of which there is no prediction), leave the experts out, change the
links (a tenth of the rate) or the ranks (the last one takes twice as long, which the plan does not
know). In the variants with replicas all ranks hold all dense matrices, as under ZeRO-0, and pass
results on. In those of HSDP, which need four ranks, two ranks share them and two hold the same. In
two groups of replicas, each group orthogonalizes every matrix.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from slowed_links import Links

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.stack_run import StackRun
from megatron_muon.newton_schulz.standard import Standard
from megatron_muon.plan import buckets, dealing, schedule
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import RowLayout
from megatron_muon.plan.schedule import Depth, Round
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.step_estimate import PlanSeconds, step_seconds
from megatron_muon.runtime.owned_parameters import OwnedParameter, lay_out
from megatron_muon.runtime.owner_compute import OwnerCompute
from megatron_muon.runtime.sharded_matrix import ShardedMatrix

COLS = 64
# Rows of the dense matrices, and of the experts of the first and of the second domain, or of each
# rank where none share any: a rank with few experts owns more dense matrices.
DENSE = (256, 192, 192, 128, 128, 128, 96, 96, 64, 64, 64, 64)
EXPERTS = ((192, 128, 128, 96, 96, 64, 64), (96, 64))
PAIRS = ((0, 1), (2, 3))  # of four ranks
SLOW_RANK = 2.0  # times as long
# With these rates the largest matrix takes 140 ms, and its rows 12 ms over the link of its owner.
TFLOPS, GBPS = 1.7e-4, 2e-3
LATENCY_US = 1000  # of a collective on gloo, about


@dataclasses.dataclass(frozen=True)
class Variant:
    """What one row of the table changes.

    Args:
        name: Of the row.
        depth: Buckets under way; None for as many as fit.
        is_in_turn: Whether the rounds of one kind come after those of the other.
        is_apart: Whether one kind starts when the other has ended.
        num_buckets: Buckets of each kind; None for those of the shortest step.
        num_scatters: Scatters of each bucket, where all ranks hold all rows; 0 where they share
            experts and dense matrices out.
        link: Factor of the rate of links.
        has_slow_rank: Whether the last rank is slow.
        is_portioned: Whether matrices are orthogonalized while their rows arrive.
        has_experts: Whether there are experts beside the dense matrices.
        is_hsdp: Whether two instances of half of the ranks hold the same dense matrices, each
            sharded over its ranks; on four ranks.
        num_groups: Groups of instances that each orthogonalize every dense matrix; two on four
            ranks.
    """

    name: str
    depth: Depth | None = None
    is_in_turn: bool = False
    is_apart: bool = False
    num_buckets: int | None = None
    num_scatters: int = 0
    link: float = 1.0
    has_slow_rank: bool = False
    is_portioned: bool = False
    has_experts: bool = True
    is_hsdp: bool = False
    num_groups: int = 1

    @property
    def needs_four_ranks(self) -> bool:
        """Whether it is left out on fewer."""
        return self.is_hsdp or self.num_groups > 1


VARIANTS = tuple(
    Variant(f"{name}{suffix}", link=link, has_slow_rank=has_slow_rank, **changes)
    for suffix, link, has_slow_rank in (
        ("", 1.0, False),
        (", links at a tenth", 0.1, False),
        (", slow rank", 1.0, True),
    )
    for name, changes in (
        ("one schedule", {}),
        ("one bucket under way", {"depth": Depth(1, 1)}),
        ("one bucket", {"num_buckets": 1}),
        ("kinds in turn, one under way", {"depth": Depth(1, 1), "is_in_turn": True}),
        ("kinds apart, one under way", {"depth": Depth(1, 1), "is_apart": True}),
        ("portioned", {"is_portioned": True}),
        ("portioned, one bucket", {"is_portioned": True, "num_buckets": 1}),
        ("dense alone, one bucket", {"has_experts": False, "num_buckets": 1}),
        (
            "dense alone, portioned, one bucket",
            {"has_experts": False, "is_portioned": True, "num_buckets": 1},
        ),
        ("replicas", {"num_scatters": 4}),
        ("replicas, one bucket", {"num_scatters": 4, "num_buckets": 1}),
        ("replicas, one bucket, one scatter", {"num_scatters": 1, "num_buckets": 1}),
        ("replicas, two groups", {"num_scatters": 4, "num_groups": 2}),
        ("HSDP", {"is_hsdp": True}),
        ("HSDP, two groups", {"is_hsdp": True, "num_groups": 2}),
        ("HSDP, one bucket", {"is_hsdp": True, "num_buckets": 1}),
        ("HSDP, portioned", {"is_hsdp": True, "is_portioned": True}),
        (
            "HSDP, portioned, one bucket",
            {"is_hsdp": True, "is_portioned": True, "num_buckets": 1},
        ),
    )
)


def in_turn(num_buckets: Sequence[int]) -> tuple[Round, ...]:
    """Return the rounds of a step in which one plan follows the other."""
    return tuple(Round(plan, i) for plan, number in enumerate(num_buckets) for i in range(number))


def owned(name: str, rows: Sequence[int], group: Any, replica_group: Any = None) -> OwnedParameter:
    """Make a parameter of which each rank of a group holds some rows."""
    ends = list(itertools.accumulate(rows, initial=0))
    layout = RowLayout(ends[-1], COLS, tuple(zip(ends, ends[1:], strict=False)))
    matrix = ShardedMatrix(name, layout, group, replica_group)
    return OwnedParameter(torch.zeros(matrix.local_shape), matrix, None, None, None)


def replicated(name: str, num_rows: int) -> OwnedParameter:
    """Make a parameter of which all ranks hold all rows."""
    layout = RowLayout(num_rows, COLS, ((0, num_rows),))
    matrix = ShardedMatrix(name, layout, None, dist.group.WORLD)
    return OwnedParameter(torch.zeros(matrix.local_shape), matrix, None, None, None)


def even_rows(num_rows: int, num_ranks: int) -> list[int]:
    """Share rows out."""
    ends = [num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
    return [stop - start for start, stop in zip(ends, ends[1:], strict=False)]


def _group_of(rank: int, sets: Sequence[Sequence[int]]) -> Any:
    groups = [dist.new_group(list(ranks)) for ranks in sets]
    return next(group for group, ranks in zip(groups, sets, strict=True) if rank in ranks)


def build(variant: Variant) -> list[OwnerCompute]:
    """Plan experts and dense matrices; what is returned runs one after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if variant.is_hsdp:
        shards, replicas = (_group_of(rank, sets) for sets in (PAIRS, ((0, 2), (1, 3))))
        rows = [owned(f"dense.{i}", even_rows(n, 2), shards, replicas) for i, n in enumerate(DENSE)]
        return [_compute(variant, [rows])]
    if variant.num_scatters:
        return [_compute(variant, [[replicated(f"dense.{i}", n) for i, n in enumerate(DENSE)]])]
    # Two ranks and three have experts of their own, four ranks share them in twos.
    group = _group_of(rank, PAIRS) if size == 4 else None
    shapes = EXPERTS[rank // 2 if group else min(rank, 1)]
    num_holders = 2 if group else 1
    experts = [owned(f"expert.{i}", even_rows(n, num_holders), group) for i, n in enumerate(shapes)]
    dense = [owned(f"dense.{i}", even_rows(n, size), dist.group.WORLD) for i, n in enumerate(DENSE)]
    if not variant.has_experts:
        return [_compute(variant, [dense])]
    if not variant.is_apart:
        return [_compute(variant, [experts, dense])]
    first = _compute(variant, [experts])
    return [first, _compute(variant, [dense], first.load_s)]


def _compute(
    variant: Variant, kinds: Sequence[Sequence[OwnedParameter]], initial_load_s: float = 0.0
) -> OwnerCompute:
    rate = GBPS * variant.link
    rates = f"tflops={TFLOPS},gbps={rate},gbps_between_nodes={rate},kernel_us=0"
    rates += f",all_reduce_us={LATENCY_US}"
    cpu = torch.device("cpu")
    return OwnerCompute(
        [lay_out(kind, cpu) for kind in kinds],
        NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (1.0,)),
        ExchangeSettings(
            max_parts=1,
            instance_groups=variant.num_groups,
            cost_model=f"{rates},stack_tiles=1",
            overlap_within_matrices=variant.is_portioned,
        ),
        initial_load_s=initial_load_s,
        device=cpu,
    )


def predict(compute: OwnerCompute, variant: Variant) -> float:
    """Return the seconds of a step of all ranks."""
    gathered: list[Any] = [[] for _ in range(dist.get_world_size())]
    dense = compute.plans[-1]
    dist.all_gather_object(
        gathered, ([plan.plan_seconds for plan in compute.plans], dense.assignment.load_s)
    )
    slow = {dist.get_world_size() - 1: SLOW_RANK} if variant.has_slow_rank else {}
    # Experts first, as ranks have them. Other ranks may have other experts, or dense matrices in
    # another group.
    plans: list[dict[tuple[int, ...], PlanSeconds]] = [{} for _ in compute.plans]
    local_s: dict[int, float] = {}
    for of_rank, load_s in gathered:
        local_s.update(load_s)
        for of_kind, plan in zip(plans, of_rank, strict=True):
            of_kind[tuple(plan.ranks)] = plan
    all_plans = [plan for of_kind in plans for plan in of_kind.values()]
    for plan in all_plans:
        for bucket in plan.buckets:
            for rank, seconds in bucket.load_s.items():
                local_s[rank] -= seconds
    return max(
        step_seconds(
            [_slowed(plan, slow) for plan in all_plans],
            {rank: max(0.0, seconds) * slow.get(rank, 1.0) for rank, seconds in local_s.items()},
        ).values()
    )


def _slowed(plan: PlanSeconds, factors: Mapping[int, float]) -> PlanSeconds:
    buckets_of = [
        dataclasses.replace(
            bucket,
            load_s={rank: s * factors.get(rank, 1.0) for rank, s in bucket.load_s.items()},
            edge_s={rank: s * factors.get(rank, 1.0) for rank, s in bucket.edge_s.items()},
        )
        for bucket in plan.buckets
    ]
    return dataclasses.replace(plan, buckets=buckets_of)


def measure(computes: Sequence[OwnerCompute], variant: Variant, num_steps: int) -> float:
    """Return the median seconds of a step."""
    cost = computes[-1].plans[-1].cost
    links = Links(cost)
    is_slow = variant.has_slow_rank and dist.get_rank() == dist.get_world_size() - 1
    factor = SLOW_RANK if is_slow else 1.0

    def run(_self: Standard, stack: torch.Tensor, _call: Any) -> torch.Tensor:
        """Take the time of Newton-Schulz."""
        time.sleep(factor * len(stack) * cost.newton_schulz_seconds(*stack.shape[1:]))
        return stack.clone()

    def start_run(_self: Standard, stack: torch.Tensor, _call: Any, starts: Any) -> "_Sleeping":
        """Take the time of each product."""
        return _Sleeping(stack, starts, cost, factor)

    plans = [plan for compute in computes for plan in compute._engine._plans]
    parameters = [param for plan in plans for param in plan._rows._handles.values()]
    rows = {param: torch.ones_like(param) for param in parameters}
    found = []
    with (
        mock.patch.object(Standard, "run", run),
        mock.patch.object(Standard, "start", start_run),
        mock.patch.object(dist, "all_to_all_single", links.all_to_all_single),
        mock.patch.object(dist, "all_gather_into_tensor", links.all_gather_into_tensor),
    ):
        for _ in range(num_steps):
            dist.barrier()
            start = time.perf_counter()
            for compute in computes:
                for _ in compute.orthogonalize(rows, rows):
                    pass
            dist.barrier()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


class _Sleeping(StackRun):
    """Take the time of Newton-Schulz of a stack on its way."""

    def __init__(
        self, stack: torch.Tensor, borders: Sequence[int], cost: CostModel, factor: float
    ) -> None:
        shape = stack.shape[1:]
        self._edge_s = factor * len(stack) * cost.edge_seconds(*shape)
        self._others_s = factor * len(stack) * cost.newton_schulz_seconds(*shape)
        self._others_s -= 2 * self._edge_s
        self._borders = borders
        self.result = torch.empty_like(stack)
        self._stack = stack

    def _edge(self, portion: int) -> None:
        share = (self._borders[portion + 1] - self._borders[portion]) / self._borders[-1]
        time.sleep(share * self._edge_s)

    def add(self, portion: int) -> None:
        """Take the time of a share of the first product."""
        self._edge(portion)

    def iterate(self) -> None:
        """Take the time of all steps but for the first and the last product."""
        time.sleep(self._others_s)
        self.result.copy_(self._stack)

    def finish(self, portion: int) -> None:
        """Take the time of a share of the last product."""
        self._edge(portion)


def run_rank(rank: int, size: int, store: str, output: str, num_steps: int, count: int) -> None:
    """Run all variants on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    rows = []
    for variant in VARIANTS[:count]:
        if variant.needs_four_ranks and size != 4:
            continue
        with contextlib.ExitStack() as changes:
            for module, name, value in _changes(variant):
                changes.enter_context(mock.patch.object(module, name, value))
            schedule._actions_of.cache_clear()
            computes = build(variant)
            predicted_s = None if variant.is_apart else predict(computes[0], variant)
            measured_s = measure(computes, variant, num_steps)
        plans = [plan for compute in computes for plan in compute.plans]
        rows.append(
            {
                "ranks": size,
                "variant": variant.name,
                "buckets": [len(plan.buckets) for plan in plans],
                "predicted_ms": None if predicted_s is None else predicted_s * 1e3,
                "measured_ms": measured_s * 1e3,
            }
        )
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _changes(variant: Variant) -> Iterator[tuple[Any, str, Any]]:
    """Yield module, name and value of what a variant changes in the planner."""
    if variant.depth is not None:
        yield buckets, "_DEPTHS", (variant.depth,)
    if variant.num_buckets is not None:
        yield dealing, "_NUM_BUCKETS", (variant.num_buckets,)
    if variant.num_scatters:
        yield buckets, "_NUM_SCATTERS", (variant.num_scatters,)
    if variant.is_portioned:
        yield buckets, "_WORTH_PORTIONS", math.inf
    if variant.is_in_turn:
        yield schedule, "rounds_of", in_turn


def agreement(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of pairs of variants, of as many ranks, that both put in one order.

    Pairs whose measured times differ by less than 3 % are left out: either order is right.
    """
    pairs = [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if a["ranks"] == b["ranks"]
        and abs(a["measured_ms"] - b["measured_ms"]) > 0.03 * a["measured_ms"]
    ]
    same = sum(
        (a["measured_ms"] < b["measured_ms"]) == (a["predicted_ms"] < b["predicted_ms"])
        for a, b in pairs
    )
    return same / max(1, len(pairs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], choices=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=3, help="steps of each variant")
    parser.add_argument("--variants", type=int, default=len(VARIANTS), help="so many of them")
    options = parser.parse_args(arguments)
    rows = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            mp.spawn(
                run_rank,
                (size, f"{folder}/store", str(output), options.steps, options.variants),
                nprocs=size,
            )
            rows += json.loads(output.read_text())
    print("| ranks | variant | buckets | predicted ms | measured ms | error |")
    print("| ---: | --- | --- | ---: | ---: | ---: |")
    for row in rows:
        predicted, error = "-", "-"
        if row["predicted_ms"] is not None:
            predicted = f"{row['predicted_ms']:.0f}"
            error = f"{row['predicted_ms'] / row['measured_ms'] - 1:+.1%}"
        counts = " + ".join(map(str, row["buckets"]))
        print(
            f"| {row['ranks']} | {row['variant']} | {counts} | {predicted} | "
            f"{row['measured_ms']:.0f} | {error} |"
        )
    rows = [row for row in rows if row["predicted_ms"] is not None]
    errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows]
    print(
        f"\nLargest error {max(errors):.1%}, mean {statistics.mean(errors):.1%}; of pairs of "
        f"variants that differ, {agreement(rows):.0%} are in the same order"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
