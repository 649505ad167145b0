# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of a step, and what of it is the same on all ranks."""

from collections import Counter
from types import SimpleNamespace

from helpers.layouts import matrix_lists, plan_orders
from helpers.planned import assign
from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.rank_schedule import RankSchedule

from megatron_muon.plan import ExchangePlan, rank_schedule
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.schedule import Action, PlanOrder, actions_of, rounds_of
from megatron_muon.plan.wire import Wire

_WIRE = Wire.of("bf16", is_bf16=True)


def _of_plan(orders: list[PlanOrder], plan: int) -> list[tuple[str, int]]:
    """Return what a rank does for one of its plans, in order."""
    actions = [action for action in actions_of(orders) if action.kind != "local"]
    return [(action.kind, action.number) for action in actions if action.plan == plan]


@given(st.lists(plan_orders(), min_size=1, max_size=3))
def test_order_of_a_plans_actions_does_not_depend_on_other_plans(orders):
    """Ranks of one plan may have other plans besides: otherwise they would wait for ever."""
    for plan, order in enumerate(orders):
        assert _of_plan(orders, plan) == _of_plan([order], 0)


@given(plan_orders())
def test_each_action_comes_once_and_after_what_it_needs(order):
    """Rows arrive, are orthogonalized, results leave and arrive."""
    log = _of_plan([order], 0)
    of_gather = ["start_gather", "wait_for_gather", *["first_product"] * order.is_portioned]
    of_scatter = [
        *["last_product"] * order.is_portioned,
        "start_scatter",
        "finish_scatter",
    ]
    num_gathers, num_scatters = (
        order.num_buckets * count for count in (order.num_gathers, order.num_scatters)
    )
    assert Counter(log) == Counter(
        [(kind, gather) for kind in of_gather for gather in range(num_gathers)]
        + [("orthogonalize", bucket) for bucket in range(order.num_buckets)]
        + [(kind, scatter) for kind in of_scatter for scatter in range(num_scatters)]
    )
    for bucket in range(order.num_buckets):
        orthogonalized = log.index(("orthogonalize", bucket))
        for gather in order.gathers_of(bucket):
            found = [log.index((kind, gather)) for kind in of_gather] + [orthogonalized]
            assert found == sorted(found)
        for scatter in order.scatters_of(bucket):
            found = [orthogonalized] + [log.index((kind, scatter)) for kind in of_scatter]
            assert found == sorted(found)
    # No more are under way than the depth says: buckets ahead, scatters behind.
    ahead = behind = 0
    for kind, _ in log:
        ahead += (kind == "start_gather") - (kind == "wait_for_gather")
        behind += (kind == "start_scatter") - (kind == "finish_scatter")
        assert ahead <= order.depth.ahead * order.num_gathers and behind <= order.depth.behind


def test_plans_get_through_their_buckets_evenly():
    """Two buckets of one plan come at a quarter and three quarters of the other's."""
    assert rounds_of([4, 2]) == ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3))
    assert rounds_of([0, 2]) == ((1, 0), (1, 1)) and rounds_of([0]) == ()


@given(st.lists(matrix_lists(max_matrices=8), min_size=1, max_size=2))
def test_every_local_stack_has_one_turn(lists):
    """In a round, or at the end; with its memory."""
    cost = CostModel(stack_tiles=4)
    plans = [
        ExchangePlan.build(matrices, assign(matrices, cost, _WIRE), cost, _WIRE, staging_bytes=1)
        for matrices in lists
    ]
    for rank in plans[0].matrices[0].ranks:
        built = RankSchedule.build(plans, rank)
        turns = [action.number for action in built.actions if action.kind == "local"]
        assert turns == list(range(len(built.local)))
        assert len(built.local) == len(built.staging.local)
        assert Counter(stack for stacks in built.local for stack in stacks) == Counter(
            (plan, number)
            for plan, rank_plan in enumerate(built.rank_plans)
            for number, _ in enumerate(rank_plan.local)
        )


def test_local_matrices_fill_the_end_too():
    """There the last results travel."""
    rank_plan = SimpleNamespace(bucket_load_s=(2.0, 1.0), local_load_s=(1.5, 1.0, 0.5))
    actions = [Action("orthogonalize", 0, 0), Action("orthogonalize", 0, 1)]
    first, second, end = rank_schedule._deal([rank_plan], actions)
    assert first == () and second == ((0, 1),) and end == ((0, 0), (0, 2))
