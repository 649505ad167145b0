# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans stay within the memory that they may have, and use it where the step gains."""

import re
from unittest import mock

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from helpers.planned import assign, planned_in
from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.assignment import Assignment
from megatron_muon.plan.bucket_memory import FullestRanks
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import Machine, Parallelism, simulate
from megatron_muon.plan.rank_schedule import RankSchedule

from megatron_muon.plan import ExchangePlan, bucket_memory
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import staging_problem
from megatron_muon.plan.layout import whole_matrix
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.wire import Wire

_WIRE = Wire.of("bf16", is_bf16=True)


def _all_within(plan: ExchangePlan) -> bool:
    layouts = (RankSchedule.build([plan], rank).staging for rank in plan.plan_seconds.ranks)
    return all(layout.num_bytes <= plan.staging_bytes for layout in layouts)


@given(
    matrix_lists(max_matrices=12),
    st.sampled_from([1, 5000, 10_000, 20_000, 2**31]),
    st.booleans(),
)
def test_plans_stay_within_the_memory_that_they_name(matrices, staging_bytes, in_portions):
    """They name no more than they may have, where one fits; all ranks stay within it."""
    cost = CostModel(stack_tiles=1)
    assignment = assign(matrices, cost, _WIRE)
    with planned_in(num_portions=3):
        least, plan = (
            ExchangePlan.build(
                matrices, assignment, cost, _WIRE, staging_bytes=limit, may_portion=in_portions
            )
            for limit in (1, staging_bytes)
        )
    assert least.staging_bytes <= plan.staging_bytes
    assert plan.staging_bytes <= max(least.staging_bytes, staging_bytes)
    assert (staging_problem([plan], staging_bytes) is None) == (
        least.staging_bytes <= staging_bytes
    )
    for rank in matrices[0].ranks:
        staged = RankSchedule.build([plan], rank).staging.num_bytes
        # Each buffer is aligned to 256 bytes, also small ones that the plan leaves out; parts of
        # split matrices are rounded to rows, and chunks of replicas to eight elements.
        num_buffers = 3 * len(plan.buckets) + 2 * len(plan.buckets) * plan.num_scatters
        if plan.order.is_portioned:
            # A short shard may have all of its lines in one portion.
            staged -= 2 * sum(matrix.num_elements for matrix in matrices) // 3
        assert staged <= plan.staging_bytes + 256 * num_buffers + 2000


def test_limit_holds_on_ranks_that_are_not_looked_at_first():
    """Which rank is the fullest depends on which buckets are under way together."""

    def planned(staging_bytes: int) -> ExchangePlan:
        grid = Parallelism(dp=8, tp=4, hsdp=2, joins_tensor_ranks=True)
        settings = ExchangeSettings(staging_bytes=staging_bytes)
        (plan,) = simulate(PRESETS["llama3-8b"], grid, Machine(), settings).plans
        return plan

    with mock.patch.object(FullestRanks, "look_at_fuller", return_value=0):
        assert not _all_within(planned(700_000_000))
    for limit in (700_000_000, 900_000_000):
        plan = planned(limit)
        assert plan.staging_bytes <= limit and _all_within(plan)
    # What a refusal names works.
    with pytest.raises(ValueError, match=r"Set exchange.staging_bytes to \d+ or more") as refusal:
        planned(1)
    least = int(re.search(r"staging_bytes to (\d+)", str(refusal.value))[1])
    plan = planned(least)
    assert plan.staging_bytes <= least and _all_within(plan)


def test_plans_name_what_buffers_take_also_where_the_estimate_has_smaller_gaps():
    """Of a few kilobytes, gaps were a fifth: a plan named 2,650 bytes and took 2,816.

    Here the estimate has no gaps at all.
    """
    cost = CostModel(stack_tiles=1)
    cells = [(1,), (0,), (3,), (2,)]
    qkv = (3, 2, 2)
    matrices = [
        whole_matrix(f"{i}.weight", rows_cut_at(rows, cols, cuts), [cells], split_shapes=split)
        for i, (rows, cols, cuts, split) in enumerate(
            [(2, 1, [1, 0, 1, 0], None)] * 3
            + [(20, 13, [10, 0, 10, 0], None), (36, 25, [10, 8, 10, 8], None)]
            + [(8, 1, [4, 0, 4, 0], (2, 1, 1)), (56, 23, [28, 0, 28, 0], qkv)]
            + [(70, 11, [35, 0, 35, 0], qkv)]
        )
    ]
    assignment = assign(matrices, cost, _WIRE)

    def planned(limit: int) -> ExchangePlan:
        """Plan within a limit."""
        return ExchangePlan.build(matrices, assignment, cost, _WIRE, staging_bytes=limit)

    with mock.patch.object(bucket_memory, "GAPS", 1.0):
        least = planned(1).staging_bytes
        plans = {limit: planned(limit) for limit in range(least, 3 * least, 100)}
    for limit, plan in plans.items():
        assert plan.staging_bytes <= limit and _all_within(plan)


def test_local_stacks_count_on_any_rank_and_with_their_padding():
    """A rank that holds one large matrix whole is not among those that exchange most.

    Seven matrices are stacked in the room of eight.
    """
    cost = CostModel()
    cells = [(rank,) for rank in range(18)]
    shared = rows_cut_at(64, 64, [4] * 16 + [0, 0])
    matrices = [whole_matrix(f"{i}.weight", shared, [cells]) for i in range(40)]
    for whole in ([17], [16] * 7):
        layouts = [rows_cut_at(512, 512, [512 * (r == rank) for r in range(18)]) for rank in whole]
        local = [whole_matrix(f"whole.{i}", rows, [cells]) for i, rows in enumerate(layouts)]
        owners = tuple((i % 16,) for i in range(40)) + tuple((rank,) for rank in whole)
        assignment = Assignment(owners, dict.fromkeys(range(18), 1.0), 1.0)
        plan = ExchangePlan.build([*matrices, *local], assignment, cost, _WIRE, staging_bytes=2**31)
        assert set(range(40, 40 + len(whole))) <= set(plan.local)
        assert _all_within(plan)
        limit = plan.staging_bytes
        again = ExchangePlan.build(
            [*matrices, *local], assignment, cost, _WIRE, staging_bytes=limit
        )
        assert staging_problem([again], limit) is None and _all_within(again)


def test_local_stack_of_a_rank_that_hardly_exchanges_counts_too():
    """Eighteen ranks stage more than it in all, but less at a time."""
    cost = CostModel(stack_tiles=1)
    cells = [(rank,) for rank in range(19)]
    shared = rows_cut_at(72, 64, [4] * 18 + [0])
    matrices = [whole_matrix(f"{i}.weight", shared, [cells]) for i in range(400)]
    matrices.append(whole_matrix("whole", rows_cut_at(200, 200, [0] * 18 + [200]), [cells]))
    owners = (*((i % 18,) for i in range(400)), (18,))
    assignment = Assignment(owners, dict.fromkeys(range(19), 1.0), 1.0)
    plan = ExchangePlan.build(matrices, assignment, cost, _WIRE, staging_bytes=1)
    assert plan.local == (400,) and _all_within(plan)


def test_kinds_have_equal_shares_of_the_limit():
    """Two need twice what the larger one needs."""
    cost = CostModel(stack_tiles=1)
    small, large = (
        [
            whole_matrix(f"{i}.weight", rows_cut_at(rows, 64, [rows // 2] * 2), [[(0,), (1,)]])
            for i in range(8)
        ]
        for rows in (32, 256)
    )
    plans = [
        ExchangePlan.build(each, assign(each, cost, _WIRE), cost, _WIRE, staging_bytes=1)
        for each in (small, large)
    ]
    needed = 2 * plans[1].staging_bytes
    assert plans[0].staging_bytes < plans[1].staging_bytes
    assert staging_problem(plans, needed) is None
    problem = staging_problem(plans, needed - 1)
    assert f"equally for each of 2 kinds, got {needed:,}" in problem
    assert f"0.weight, has {2 * 256 * 64:,}, the largest stack {2 * 256 * 64:,}" in problem
