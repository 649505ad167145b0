# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Groups of instances that each orthogonalize every matrix: when, and on which ranks."""

import dataclasses
import json
import re
from typing import Any
from unittest import mock

import pytest
from helpers.layouts import domains
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_muon.plan.assignment import Assignment, assignments, matrix_seconds
from megatron_muon.plan.domain_plan import (
    group_of,
    groups_problem,
    most_instances,
    of_group,
    plan_domain,
)
from megatron_muon.plan.preview import simulation
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import Machine, Parallelism, simulate
from megatron_muon.plan.report import build_report

from megatron_muon.plan import ExchangePlan, domain_plan
from megatron_muon.plan.__main__ import main
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, RowLayout, whole_matrix
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.wire import Wire

_WIRE = Wire("bfloat16", "bfloat16")
_COST = CostModel(kernel_us=0, all_reduce_us=0)
# Two shards of each matrix, on 8 instances of two ranks.
_REPLICAS = [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]


def _matrices(num_rows: int = 1024, number: int = 32) -> list[MatrixLayout]:
    layout = RowLayout(num_rows, 1024, ((0, num_rows // 2), (num_rows // 2, num_rows)))
    return [whole_matrix(f"layer.{i}.weight", layout, [_REPLICAS]) for i in range(number)]


def _plan(
    cost: CostModel = _COST,
    matrices: list[MatrixLayout] | None = None,
    load_s: dict[int, float] | None = None,
    **exchange: Any,
) -> ExchangePlan:
    return plan_domain(
        matrices or _matrices(),
        _REPLICAS,
        cost,
        _WIRE,
        ExchangeSettings(**exchange),
        load_s=load_s or dict.fromkeys(range(16), 0.0),
    )


@settings(deadline=None, max_examples=60)
@given(domains(max_replicas=4), st.data())
def test_each_group_has_the_plan_of_the_first_on_ranks_of_its_own(domain, data):
    """All rows of all matrices are in each group, on the ranks that hold them there."""
    matrices, replicas = domain
    sizes = [size for size in range(1, len(replicas[0]) + 1) if len(replicas[0]) % size == 0]
    num_groups = data.draw(st.sampled_from(sizes))
    ranks = sorted(rank for same_rows in replicas for rank in same_rows)
    plan = plan_domain(
        matrices,
        replicas,
        CostModel(tflops=1e-7),
        _WIRE,
        ExchangeSettings(instance_groups=num_groups),
        load_s=dict.fromkeys(ranks, 0.0),
    )
    assert plan.num_groups == num_groups
    seen: list[int] = []
    for number in range(num_groups):
        found = of_group(plan, replicas, number)
        members = found.plan_seconds.ranks
        assert all(group_of(plan, replicas, rank) == number for rank in members)
        seen += members
        assert (found.buckets, found.local) == (plan.buckets, plan.local)
        assert sorted(found.assignment.load_s) == list(members)
        for seconds, of_first in zip(found.seconds, plan.seconds, strict=True):
            assert set(seconds.load_s) <= set(members)
            assert sorted(seconds.load_s.values()) == sorted(of_first.load_s.values())
        for matrix, whole, owners in zip(found.matrices, matrices, found.owners, strict=True):
            assert set(owners) <= set(matrix.ranks)
            assert list(matrix.ranks) == sorted(set(whole.ranks) & set(members))
            assert [region._replace(holders=()) for region in matrix.regions] == [
                region._replace(holders=()) for region in whole.regions
            ]
            assert [region.holders for region in matrix.regions] == [
                tuple(rank for rank in region.holders if rank in members)
                for region in whole.regions
            ]
    assert sorted(seen) == ranks


def test_instances_work_apart_where_links_between_them_are_slow():
    """One group on fast links, as many as instances on very slow ones, between them some."""
    chosen = []
    for gbps in (1e4, 20.0, 5.0, 2.0, 0.01):
        cost = CostModel(
            kernel_us=0, all_reduce_us=0, gbps_between_nodes=gbps, ranks_per_node=2, tflops=100
        )
        steps_s = {
            groups: _plan(cost, instance_groups=groups).predicted_step_s for groups in (1, 2, 4, 8)
        }
        plan = _plan(cost)
        assert plan.predicted_step_s == steps_s[plan.num_groups]
        # More work has to gain 10 %.
        assert domain_plan._WORTH_WORK * plan.predicted_step_s <= min(steps_s.values())
        assert plan.num_groups == 1 or plan.predicted_step_s <= 0.9 * steps_s[1]
        chosen.append(plan.num_groups)
    assert chosen == sorted(chosen)
    assert chosen[0] == 1 and chosen[-1] == 8 and len(set(chosen)) > 2


def test_groups_that_only_promise_to_be_faster_are_not_chosen():
    """The size is chosen by a short estimate, then its plan has to be faster."""
    with mock.patch.object(domain_plan, "_about_seconds", lambda *_: 0.0):
        assert _plan(CostModel(gbps_between_nodes=1e4)).num_groups == 1


@pytest.mark.parametrize("gbps", [45.0, 12.5, 4.0])
@pytest.mark.parametrize(
    ("preset", "jobs"),
    [
        ("llama3-8b", {"dp": 32, "hsdp": 4}),
        # Rows cross nodes inside of an instance; a rank may have one matrix.
        ("llama3-8b", {"dp": 64, "hsdp": 4}),
        ("llama3-8b", {"dp": 16, "sharding": "no_shard"}),
        ("qwen3-30b-a3b", {"dp": 32, "ep": 4, "hsdp": 4}),
    ],
    ids=["hsdp", "large_instances", "zero0", "experts"],
)
def test_short_estimate_is_near_that_of_a_plan(preset, jobs, gbps):
    """Within 25 %, for groups of all sizes, of which it chooses one."""
    ratios = []

    def planned(matrices: Any, replicas: Any, *arguments: Any, load_s: Any, **others: Any) -> Any:
        """Plan groups of all sizes."""
        cost, wire, exchange = arguments
        for size in domain_plan._smaller_divisors(len(replicas[0])):
            groups = dataclasses.replace(exchange, instance_groups=len(replicas[0]) // size)
            plan = plan_domain(matrices, replicas, cost, wire, groups, load_s=load_s, **others)
            about_s = domain_plan._about_seconds(matrices, replicas, size, cost, wire, load_s)
            ratios.append(about_s / plan.predicted_step_s)
        return plan_domain(matrices, replicas, *arguments, load_s=load_s, **others)

    with mock.patch.object(simulation, "plan_domain", planned):
        simulate(
            dataclasses.replace(PRESETS[preset], num_layers=8),
            Parallelism(**jobs),
            Machine(CostModel(gbps_between_nodes=gbps)),
            ExchangeSettings(),
            rank=0,
        )
    assert len(ratios) >= 2
    assert 0.75 < min(ratios) <= max(ratios) < 1.25, ratios


def test_sizes_that_cannot_be_better_are_not_planned():
    """Planning for thousands of ranks takes seconds."""
    with mock.patch.object(domain_plan, "assignments", wraps=assignments) as chosen:
        assert _plan(CostModel(tflops=0.01)).num_groups == 1
    assert chosen.call_count == 1


@pytest.mark.parametrize(
    ("other_step_s", "other_bytes", "takes_other"),
    [(0.9, 50, True), (0.9, 100, True), (0.9, 101, False), (0.999, 50, False)],
    ids=["shorter", "as_much_memory_as_there_is", "more_memory", "equal"],
)
def test_other_owners_are_taken_if_their_plan_is_shorter(other_step_s, other_bytes, takes_other):
    """Of two plans whose steps are nearly equal, that with less traffic stays: the first."""
    plans = {
        0: mock.Mock(predicted_step_s=1.0, staging_bytes=60),
        1: mock.Mock(predicted_step_s=other_step_s, staging_bytes=other_bytes),
    }
    best, other = (Assignment(((rank,),), {rank: 0.5}, 0.5) for rank in plans)
    found = domain_plan._fastest(lambda each: plans[each.owners[0][0]], best, [other], 100)
    assert found is plans[takes_other]


def test_owners_that_cannot_be_faster_are_not_planned():
    """Their busiest rank alone takes as long as the step of the first."""
    best, other = (Assignment(((rank,),), {rank: 1.0}, 0.5) for rank in (0, 1))
    plan = mock.Mock(predicted_step_s=1.001, staging_bytes=1)
    plan_of = mock.Mock(return_value=plan)
    assert domain_plan._fastest(plan_of, best, [other], 100) is plan
    plan_of.assert_called_once_with(best)


def test_traffic_that_is_hidden_does_not_keep_owners_from_sharing_work():
    """Qwen3-30B on 64 ranks: the owners with the shortest step by the short estimate had 39.6 ms.

    Those with 10 % less load take more traffic, nearly all of it hidden.
    """
    steps_ms = []
    for choose in (assignments, lambda *given, **named: assignments(*given, **named)[:1]):
        with mock.patch.object(domain_plan, "assignments", choose):
            grid = Parallelism(dp=64, ep=8)
            found = simulate(PRESETS["qwen3-30b-a3b"], grid, Machine(), ExchangeSettings())
        steps_ms.append(1e3 * build_report(range(64), found.plans).step_s)
    assert steps_ms[0] < 0.95 * steps_ms[1]


def test_no_group_splits_a_matrix():
    """Owners would add up in another order in another group, and instances drift apart."""
    cost = CostModel(tflops=0.01)
    matrices = _matrices(8192, 1)
    assert len(_plan(cost, matrices).owners[0]) > 1
    assert len(_plan(cost, matrices, instance_groups=2).owners[0]) == 1


def test_load_of_all_instances_counts_in_the_first_group():
    """The ranks in one place of all groups own the same: the busiest of them counts."""
    matrices = _matrices(number=2)
    plan = _plan(matrices=matrices, instance_groups=8)
    assert sorted(plan.owners) == [(0,), (1,)]
    # Rank 15 holds the second shard in the last instance.
    busy_s = dict.fromkeys(range(16), 0.0) | {15: 2 * matrix_seconds(matrices[0], _COST)}
    plan = _plan(matrices=matrices, load_s=busy_s, instance_groups=8)
    assert plan.owners == ((0,), (0,))


def test_groups_that_take_more_memory_are_not_chosen():
    """Than a rank may take, or than sharing takes."""
    cost = CostModel(gbps_between_nodes=0.01, ranks_per_node=2)
    apart, shared = (_plan(cost, instance_groups=groups) for groups in (8, 1))
    assert apart.staging_bytes > shared.staging_bytes
    # Under a limit both take less: buckets are smaller.
    apart, shared = (_plan(cost, instance_groups=groups, staging_bytes=1) for groups in (8, 1))
    assert apart.staging_bytes > shared.staging_bytes
    assert _plan(cost, staging_bytes=apart.staging_bytes).num_groups == 8
    assert _plan(cost, staging_bytes=apart.staging_bytes - 1).num_groups == 1


def _instances(number: int) -> list[tuple[int, ...]]:
    """Two shards, each held by so many ranks."""
    return [tuple(range(shard, 2 * number, 2)) for shard in (0, 1)]


@pytest.mark.parametrize(
    ("numbers", "groups", "named"),
    [
        ([8, 8], 3, "a divisor of the 8 instances that hold the same rows, got 3"),
        ([1, 8], 16, "a divisor of the 8 instances"),
        ([1, 1], 2, "ranks that hold the same rows, as those of HSDP .* got none for 2 groups"),
        ([], 2, "ranks that hold the same rows"),
        ([1, 1], 1, None),
        ([1, 8], 4, None),
        ([8, 4], 4, None),
        ([8], 1, None),
        ([8], None, None),
    ],
)
def test_groups_that_instances_cannot_form_are_refused(numbers, groups, named):
    """Domains without replicas have nothing to group, but one of the job must have."""
    domains = [_instances(number) for number in numbers]
    wanted = ExchangeSettings(instance_groups=groups)
    problem = groups_problem(domains, wanted, most=most_instances(domains))
    assert (problem is None) == (named is None)
    assert problem is None or re.match(f"exchange.instance_groups: expected {named}", problem)


def test_rank_without_replicas_does_not_stop_a_job_that_has_some():
    """Ranks of FSDP2 may have other parameters: some alone, some under HSDP."""
    wanted = ExchangeSettings(instance_groups=4)
    assert groups_problem([_instances(1)], wanted, most=8) is None
    assert groups_problem([], wanted, most=8) is None


def test_groups_whose_ranks_are_in_another_order_are_refused():
    """Rows arrive by rank: in order in one group, and in their stack; in the other out of order."""
    other_order = [(0, 3), (1, 2)]
    problem = groups_problem([other_order], ExchangeSettings(instance_groups=2), most=2)
    assert problem is not None and "the same order, got ranks in another order" in problem
    layout = RowLayout(1024, 1024, ((0, 512), (512, 1024)))
    matrices = [whole_matrix(f"layer.{i}.weight", layout, [other_order]) for i in range(8)]
    # Links between nodes take long: ordered, each instance would work by itself.
    cost = CostModel(gbps_between_nodes=0.01, ranks_per_node=2)
    for replicas, num_groups in ((other_order, 1), ([(0, 2), (1, 3)], 2)):
        plan = plan_domain(
            [whole_matrix(each.fqn, layout, [replicas]) for each in matrices],
            replicas,
            cost,
            _WIRE,
            ExchangeSettings(),
            load_s=dict.fromkeys(range(4), 0.0),
        )
        assert plan.num_groups == num_groups


def test_instances_that_lie_otherwise_over_nodes_are_not_grouped():
    """Four instances of six ranks on nodes of eight: two of them cross nodes, the first does not.

    The step was predicted to be 22 ms for all groups, where that of these two is 134.
    """
    replicas = [tuple(range(shard, 24, 6)) for shard in range(6)]
    layout = RowLayout(6144, 4096, tuple((1024 * i, 1024 * (i + 1)) for i in range(6)))
    matrices = [whole_matrix(f"layer.{i}.weight", layout, [replicas]) for i in range(24)]

    def planned(ranks_per_node: int, groups: int | None = None) -> ExchangePlan:
        """Plan on nodes of so many ranks."""
        return plan_domain(
            matrices,
            replicas,
            CostModel(gbps_between_nodes=2.0, ranks_per_node=ranks_per_node),
            _WIRE,
            ExchangeSettings(instance_groups=groups),
            load_s=dict.fromkeys(range(24), 0.0),
        )

    assert planned(6).num_groups == 4
    assert planned(8).num_groups == 1
    # A user may know better.
    assert planned(8, 4).num_groups == 4


def test_groups_use_no_kernel_that_ranks_choose_by_timing():
    """Nothing would bring weights of instances together again: they were planned with Triton's."""
    cost = CostModel(
        gbps_between_nodes=0.01, ranks_per_node=2, backends=("standard", "symmetric", "gram")
    )

    def backends(plan: ExchangePlan) -> set[str]:
        """Return those of all matrices."""
        return {plan.backend(index, 0) for index in range(len(plan.matrices))}

    layout = RowLayout(8192, 8192, ((0, 4096), (4096, 8192)))
    matrices = [whole_matrix(f"layer.{i}.weight", layout, [_REPLICAS]) for i in range(16)]
    shared = _plan(cost, matrices, newton_schulz="auto", instance_groups=1, max_parts=1)
    assert backends(shared) == {"symmetric"}
    groups = _plan(cost, matrices, newton_schulz="auto")
    assert groups.num_groups == 8 and backends(groups) == {"standard"}
    # Asked for by name they are used, and instances share the work.
    named = _plan(cost, matrices, newton_schulz="symmetric", max_parts=1)
    assert named.num_groups == 1 and backends(named) == {"symmetric"}


def test_domain_without_replicas_is_one_instance():
    """Beside others that have some: experts of one rank, dense matrices of two."""
    layout = RowLayout(64, 64, ((0, 32), (32, 64)))
    matrix = whole_matrix("weight", layout, [[(0,), (1,)]])
    wanted = ExchangeSettings(instance_groups=4)
    plan = plan_domain([matrix], [(0,), (1,)], _COST, _WIRE, wanted, load_s={0: 0.0, 1: 0.0})
    assert plan.num_groups == 1 and plan.plan_seconds.ranks == [0, 1]


def test_norms_count_once_for_all_groups():
    """They are added up over the domain, whose groups each have a plan in a report."""
    shared, groups = (_plan(instance_groups=number) for number in (1, 4))
    of_groups = [of_group(groups, _REPLICAS, number) for number in range(4)]
    reports = [
        build_report(range(16), [shared]),
        build_report(range(16), of_groups),
        build_report(of_groups[1].plan_seconds.ranks, [of_groups[1]], is_one_group=True),
    ]
    assert [report.norm_bytes for report in reports] == [8 * 32] * 3
    assert [report.num_in_groups for report in reports] == [{1: 32}, {4: 32}, {4: 32}]


def test_report_tells_the_groups(capsys):
    """And refuses a number of them by the name of its flag."""
    arguments = ["--preset", "llama3-8b", "--num-layers", "2", "--dp", "16", "--hsdp", "4"]
    assert main([*arguments, "--gbps-between-nodes", "0.1"]) == 0
    text = capsys.readouterr().out
    # Two instances share a node.
    assert "groups of instances: 8 matrices in each of 2;" in text
    assert main(arguments) == 0
    assert "groups of instances" not in capsys.readouterr().out
    assert main([*arguments, "--instance-groups", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matrices_by_instance_groups"] == {"4": 8}
    with pytest.raises(SystemExit):
        main(["--preset", "llama3-8b", "--dp", "8", "--instance-groups", "2"])
    assert "expected ranks that hold the same rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--instance-groups", "3"])
    assert (
        "--muon-fsdp-instance-groups: expected a divisor of the 4 instances that hold the same "
        "rows, got 3" in capsys.readouterr().err
    )
