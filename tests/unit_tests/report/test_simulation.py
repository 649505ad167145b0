# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A preview plans what a run plans, and what every rule of the planner is worth on known models."""

import dataclasses

import pytest

from megatron_muon.plan import ExchangePlan, ExchangeSettings
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import plan_matrices, staging_share
from megatron_muon.plan.owners import choose_owners
from megatron_muon.plan.rank_plan import RankPlan
from megatron_muon.report.preview.model_shape import PRESETS
from megatron_muon.report.preview.simulation import (
    Machine,
    Parallelism,
    Simulation,
    report_of,
    simulate,
)
from megatron_muon.report.rank_report import Report, build_report


def _simulate(
    preset: str, parallel: Parallelism, cost: CostModel | None = None, **settings: int
) -> Simulation:
    machine = Machine(cost or CostModel())
    return simulate(PRESETS[preset], parallel, machine, ExchangeSettings(**settings))


def _report(preset: str, parallel: Parallelism, **settings: int) -> Report:
    simulation = _simulate(preset, parallel, **settings)
    return report_of(simulation, ExchangeSettings(**settings))


@pytest.mark.parametrize("limit", [None, 300_000_000])
def test_preview_plans_what_a_run_plans(limit):
    """A run rounded loads between plans, and a preview did not: 48 owners differed.

    Here every rank plans experts, then dense matrices on top of them, with what it knows itself.
    """
    model = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=2)
    settings = ExchangeSettings(staging_bytes=limit)
    plans = simulate(model, Parallelism(dp=8, ep=2), Machine(), settings).plans
    *of_experts, dense = plans
    assert [plan.ranks for plan in of_experts] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    load_ns = dict.fromkeys(range(8), 0)
    staged = dict.fromkeys(range(8), 0)
    for expected in of_experts:
        plan = plan_matrices(
            expected.matrices,
            expected.cost,
            settings,
            expected.wire,
            load_ns=dict.fromkeys(expected.ranks, 0),
            staging_bytes=staging_share(settings, 0, 2),
        )
        assert plan.entries() == expected.entries()
        for rank in plan.ranks:
            load_ns[rank] = plan.assignment.load_ns[rank]
            staged[rank] = plan.staging_bytes
    plan = plan_matrices(
        dense.matrices,
        dense.cost,
        settings,
        dense.wire,
        load_ns=load_ns,
        staging_bytes=staging_share(settings, max(staged.values()), 1),
    )
    assert plan.entries() == dense.entries()


def test_splitting_is_for_jobs_with_more_ranks_than_matrices():
    """128 matrices cannot keep 512 ranks busy unless they are split."""
    split, whole = (_report("llama3-8b", Parallelism(dp=512), max_parts=n) for n in (8, 1))
    assert whole.min_step_ns > 3 * split.min_step_ns
    assert whole.busiest_over_ideal > 7 and split.busiest_over_ideal < 2.2


def test_owners_on_the_node_of_the_rows_keep_traffic_off_slow_links():
    """Fewer bytes cross nodes than with owners that are chosen as if all links were one."""
    (plan,) = _simulate("llama3-8b", Parallelism(dp=64, tp=2, joins_tensor_ranks=True)).plans
    flat = dataclasses.replace(plan.cost, gbps_between_nodes=plan.cost.gbps)
    blind = choose_owners(plan.matrices, flat, plan.wire)
    other = ExchangePlan.build(plan.matrices, blind, plan.cost, plan.wire, staging_bytes=5 * 10**9)
    crossing = []
    for each in (plan, other):
        sent = [each.sizes.traffic(bucket).gather(each.cost)[0] for bucket in each.buckets]
        crossing.append(sum(count.off_node for ranks in sent for count in ranks.values()))
    assert crossing[1] > 1.02 * crossing[0]


def test_chunks_that_replicas_pass_on_cross_nodes_once():
    """ZeRO-0 on 8 nodes: an owner would send every result to 56 ranks of other nodes itself."""
    (plan,) = _simulate("llama3-8b", Parallelism(dp=64, sharding="no_shard")).plans
    report = build_report(plan.ranks, [plan])
    sends_all_ns = 0
    for rank in plan.ranks:
        owned = [bucket.owned.num_elements for bucket in RankPlan.build(plan, rank).buckets]
        num_bytes = plan.wire.scatter_bytes * sum(owned)
        on_node_gbps = plan.cost.on_node_gbps(plan.ranks)
        time_ns = plan.cost.messages_ns(7 * num_bytes, 56 * num_bytes, on_node_gbps)
        sends_all_ns = max(sends_all_ns, time_ns)
    assert sends_all_ns > 2 * max(rank.send_ns for rank in report.ranks)


def test_stacks_are_for_experts():
    """Thousands of small matrices: one call for up to 32 of them."""
    parallel = Parallelism(dp=32, ep=8)
    model = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=8)
    reports = [
        report_of(simulate(model, parallel, Machine(cost), ExchangeSettings()), ExchangeSettings())
        for cost in (CostModel(), CostModel(stack_tiles=1))
    ]
    stacked, alone = (max(rank.num_calls for rank in report.ranks) for report in reports)
    assert alone > 5 * stacked
    assert reports[1].min_step_ns > 1.15 * reports[0].min_step_ns


def test_memory_is_shared_by_buffers_that_are_not_alive_together():
    """A buffer of its own for every message would need more than twice the memory."""
    (plan,) = _simulate("llama3-8b", Parallelism(dp=8)).plans
    totals = []
    for rank in plan.ranks:
        staging = RankPlan.build(plan, rank).staging(plan.wire)
        totals.append(sum(size for each in (*staging.buckets, *staging.scatters) for size in each))
    assert max(totals) > 2 * plan.staging_bytes


def test_llama_on_64_ranks_is_balanced():
    """The largest holders would load four ranks with 32 times the mean."""
    report = _report("llama3-8b", Parallelism(dp=64))
    assert report.busiest_over_ideal <= 1.10
    assert report.moved_elements <= 0.975 * report.num_elements
