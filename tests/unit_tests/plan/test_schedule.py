# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of a step, and what of it is the same on all ranks."""

from helpers.layouts import plan_orders
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.schedule import DEPTH, PlanOrder, actions_of, rounds_of


def _of_plan(orders: list[PlanOrder], plan: int) -> list[tuple[str, int]]:
    """Return what a rank does for one of its plans, in order."""
    actions = [action for action in actions_of(tuple(orders)) if action.kind != "local"]
    return [(action.kind, action.number) for action in actions if action.plan == plan]


@given(st.lists(plan_orders(), min_size=1, max_size=3))
def test_order_of_a_plans_actions_does_not_depend_on_other_plans(orders):
    """The order of one plan's actions does not depend on other plans of a rank."""
    for plan, order in enumerate(orders):
        assert _of_plan(orders, plan) == _of_plan([order], 0)


@given(plan_orders())
def test_each_action_comes_once_in_order_and_after_what_it_needs(order):
    """Each action comes once, after those that it needs."""
    log = _of_plan([order], 0)
    of_bucket = (
        "start_gather",
        "wait_for_gather",
        "orthogonalize",
        "start_scatter",
        "finish_scatter",
    )
    for kind in of_bucket:
        numbers = [number for other, number in log if other == kind]
        assert numbers == list(range(order.num_buckets))
    for bucket in range(order.num_buckets):
        positions = [log.index((kind, bucket)) for kind in of_bucket]
        assert positions == sorted(positions)
    # Gathers of two buckets and scatters of two are in flight during Newton-Schulz.
    ahead = behind = 0
    for kind, number in log:
        ahead += (kind == "start_gather") - (kind == "wait_for_gather")
        behind += (kind == "start_scatter") - (kind == "finish_scatter")
        assert ahead <= DEPTH and behind <= DEPTH
        if kind == "orthogonalize":
            assert ahead == min(DEPTH, order.num_buckets - number - 1)
            assert behind == min(DEPTH, number)


@given(st.lists(plan_orders(), min_size=1, max_size=3))
def test_local_matrices_are_due_while_a_gather_is_in_flight(orders):
    """Local matrices are due before each wait for rows, and at the end."""
    kinds = [action.kind for action in actions_of(tuple(orders))]
    waits = [number for number, kind in enumerate(kinds) if kind == "wait_for_gather"]
    end = len(kinds) - 1 - kinds[::-1].index("local")
    assert [n for n, kind in enumerate(kinds) if kind == "local"] == [*(n - 1 for n in waits), end]
    assert set(kinds[end + 1 :]) <= {"finish_scatter"}


def test_plans_get_through_their_buckets_evenly():
    """Buckets of a shorter plan are spread evenly among those of a longer one."""
    assert rounds_of([4, 2]) == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    assert rounds_of([0, 2]) == [(1, 0), (1, 1)] and rounds_of([0]) == []
