# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order in which a rank launches, waits and computes."""

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from helpers.layouts import rows_cut_at
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of, init_group

pytestmark = pytest.mark.ranks


def _order_of_a_step(depth: int, num_buckets: int, has_replicas: bool) -> list[Any]:
    exchange = {"comm_dtype": "bf16", "num_buckets": num_buckets}
    # About four matrices of one size for each rank, so that there are buckets enough.
    cases = [*[(12, [6, 6, 6, 6])] * 16, (12, [8, 8, 8, 8])]
    grid = {"num_shards": 4}
    if has_replicas:
        grid = {"num_shards": 2, "num_replicas": 2}
        cases = [(cols, [sum(rows[:2]), sum(rows[2:])]) for cols, rows in cases]
    with mock.patch("megatron_muon.plan.buckets._DEPTH", depth):
        optimizers = build_optimizers(**grid, exchange=exchange, cases=cases)
    (built,) = optimizers.sharded.engine.runners
    log: list[str] = []
    parts = {"gather": built._gathers, "scatter": built._scatters, "spread": built._all_gather}
    for kind, part in parts.items():
        if part is None:
            continue

        def start(index, kind=kind, original=part.start):
            work = original(index)
            log.append(f"start {kind} {index}")

            class Logged:
                def wait(self):
                    log.append(f"wait {kind} {index}")
                    return work.wait()

            return Logged() if work is not None else None

        part.start = start
    original = built._orthogonalize

    def orthogonalize(work):
        numbers = [number for number, bucket in enumerate(built._buckets) if bucket is work]
        log.append(f"orthogonalize {numbers[0] if numbers else 'local'}")
        return original(work)

    built._orthogonalize = orthogonalize
    optimizers.set_gradients(0)
    optimizers.sharded.step()
    order = built.plan.order
    return [len(built.plan.buckets), order.num_scatters, list(order.depth), log]


@pytest.mark.megatron
def test_other_buckets_are_in_flight_during_newton_schulz():
    """The order is that of plan/schedule.py."""
    depths = [1, 2, 5]
    by_rank = run_ranks(4, each_of, _order_of_a_step, [(depth, 5, False) for depth in depths])
    for depth, (count, _, (ahead, behind), log) in zip(
        4 * depths, itertools.chain(*by_rank.check().results), strict=True
    ):
        assert (count, ahead, behind) == (5, depth, depth)
        expected = [f"start gather {bucket}" for bucket in range(min(ahead, count))]
        for bucket in range(count):
            expected.append(f"wait gather {bucket}")
            expected += [f"start gather {bucket + ahead}"] * (bucket + ahead < count)
            expected.append(f"orthogonalize {bucket}")
            expected += [f"wait scatter {bucket - behind}"] * (bucket >= behind)
            expected.append(f"start scatter {bucket}")
        expected += [f"wait scatter {bucket}" for bucket in range(max(0, count - behind), count)]
        assert [entry for entry in log if entry != "orthogonalize local"] == expected


@pytest.mark.megatron
def test_replicas_gather_results_behind_their_scatter():
    """On gloo when the step waits for them; test_chained_collectives.py has the order of a GPU."""
    cases = [(1, 5, True), (2, 5, True), (1, 2, True)]
    by_rank = run_ranks(4, each_of, _order_of_a_step, cases).check().results
    for (depth, num_buckets, _), (count, num_scatters, (_, behind), log) in zip(
        4 * cases, itertools.chain(*by_rank), strict=True
    ):
        assert (count, behind) == (num_buckets, depth * num_scatters)
        assert (num_scatters > 1) == (num_buckets < 3)
        ends = count * num_scatters

        def finish(scatter):
            return [f"{what} {scatter}" for what in ("wait scatter", "start spread", "wait spread")]

        expected = []
        for bucket in range(count):
            expected.append(f"orthogonalize {bucket}")
            for scatter in range(bucket * num_scatters, (bucket + 1) * num_scatters):
                expected += finish(scatter - behind) if scatter >= behind else []
                expected.append(f"start scatter {scatter}")
        for scatter in range(ends - behind, ends):
            expected += finish(scatter)
        found = [entry for entry in log if "gather" not in entry and "local" not in entry]
        assert found == expected


def _local_matrix_beside_a_travelling_one() -> list[str]:
    """Rank 0 holds a whole matrix and half of another."""
    import torch
    import torch.distributed as dist
    from helpers.layouts import plan_of, whole_matrix

    from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
    from megatron_muon.newton_schulz.standard import Standard
    from megatron_muon.plan.cost import CPU_RANKS
    from megatron_muon.plan.rank_plan import RankSchedule
    from megatron_muon.runtime.engine import Engine
    from megatron_muon.runtime.plan_runner import BoundPlan

    init_group()
    rank = dist.get_rank()
    matrices = [
        whole_matrix(name, rows_cut_at(16, 8, rows), [[(0,), (1,)]])
        for name, rows in (("local", [16, 0]), ("shared", [6, 10]))
    ]
    plan = plan_of(matrices, CPU_RANKS)
    assert plan.local == (0,) and plan.buckets == ((1,),)
    log: list[str] = []
    newton_schulz = Standard.run

    def logged(self, stack, call):
        log.append("newton_schulz")
        return newton_schulz(self, stack, call)

    Standard.run = logged
    settings = NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (1.0, 1.0))
    shards = {"local": torch.randn(16, 8), "shared": torch.randn(6 if rank == 0 else 10, 8)}
    names = {0: "local", 1: "shared"} if rank == 0 else {1: "shared"}
    parameters = {index: shards[name] for index, name in names.items()}
    engine = Engine(
        [BoundPlan(plan, parameters, dist.group.WORLD, None, {})],
        RankSchedule.build([plan], rank),
        settings,
        device=torch.device("cpu"),
    )
    gathers = engine.runners[0]._gathers
    start = gathers.start

    def started(index):
        work = start(index)
        return SimpleNamespace(wait=lambda: (log.append("wait"), work.wait()))

    gathers.start = started
    rows = {shard: shard.clone() for shard in shards.values()}
    for params in engine.orthogonalize(rows, rows):
        log += ["apply local" if each is shards["local"] else "apply shared" for each in params]
    return log


def test_local_matrices_fill_the_time_of_the_first_gather():
    """What is whole on its rank is done while the rows of the first bucket travel."""
    log, other = run_ranks(2, _local_matrix_beside_a_travelling_one).check().results
    assert log == ["newton_schulz", "apply local", "wait", "apply shared"]
    assert other == ["wait", "newton_schulz", "apply shared"]
