# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long a step is by the model of ranks and links, mostly worked out by hand."""

from collections.abc import Sequence
from unittest import mock

import pytest
from helpers.layouts import plan_orders
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan import schedule
from megatron_muon.plan.schedule import Depth, PlanOrder, Round
from megatron_muon.report import step_estimate
from megatron_muon.report.step_estimate import step_ns
from megatron_muon.report.step_times import BucketTimes, PlanTimes


def _plan(
    ranks: Sequence[int], buckets: Sequence[BucketTimes], depth: int = 1, num_scatters: int = 0
) -> PlanTimes:
    """Return the times of a plan; with scatters given, replicas pass results on."""
    order = PlanOrder(len(buckets), num_scatters or 1, Depth(depth, depth), num_scatters > 0)
    return PlanTimes(ranks, buckets, order)


def _step(local: list[int], work: list[list[int]], traffic: int = 0, depth: int = 1) -> int:
    """Estimate a plan of several ranks, each of which has so much traffic in each bucket."""
    ranks = range(len(local))
    traffic_ns = dict.fromkeys(ranks, traffic)
    buckets = [BucketTimes(dict(enumerate(loads)), traffic_ns, traffic_ns) for loads in work]
    return max(step_ns([_plan(ranks, buckets, depth)], dict(enumerate(local))).values())


def test_step_of_balanced_buckets_is_as_long_as_the_work():
    """Local matrices fill what a rank has less of in a bucket; only the ends of traffic show."""
    assert _step([0, 0], [[10, 10], [10, 10], [10, 10]]) == 30
    assert _step([0, 32], [[12, 4], [12, 4], [12, 4]]) == 44
    assert _step([0, 0], [[10, 10], [10, 10]], traffic=5) == 5 + 20 + 5
    assert _step([20, 10], []) == 20


def test_step_of_unbalanced_buckets_waits_for_the_last_rank():
    """Three ranks that own one bucket each wait in turn, though each has as much to do.

    With all gathers and scatters in flight, none waits.
    """
    work = [[3, 0, 0], [0, 3, 0], [0, 0, 3]]
    assert _step([0, 0, 0], work) > 5
    assert _step([0, 0, 0], work, depth=3) == 3


def test_links_carry_one_collective_at_a_time():
    """Two gathers at once are as long as one after the other; by hand."""
    # Gathers end at 20 and 40; the first result leaves at 30, when the link is busy until 40.
    assert _step([0], [[10], [10]], traffic=20, depth=2) == 20 + 20 + 20 + 20
    # Gathers end at 5 and 10, results leave at 15 and 25.
    assert _step([0], [[10], [10]], traffic=5, depth=2) == 5 + 10 + 10 + 5


def test_plans_of_a_rank_share_its_link():
    """Two gathers and two scatters of 10 ns, and nothing to compute."""
    plan = _plan([0], [BucketTimes({}, {0: 10}, {0: 10})])
    assert step_ns([plan, plan], {}) == {0: 40}


def test_replicas_and_shards_share_one_port():
    """What replicas pass on was estimated as if it had a link of its own, up to 12 % too short.

    The gather of the second bucket is on the link until 50 when the first results come at 10.
    """
    buckets = [
        BucketTimes({0: 10, 1: 10}, gather_ns, {}, {0: 100, 1: 100})
        for gather_ns in ({}, {0: 50, 1: 50})
    ]
    assert step_ns([_plan([0, 1], buckets, num_scatters=1)], {}) == dict.fromkeys((0, 1), 250)


def test_rows_arrive_when_their_holders_have_sent_all():
    """Rank 0 owns one matrix; rank 1, which holds it, sends for 30 ns to others too."""
    bucket = BucketTimes({0: 10}, {0: 20, 1: 30}, {}, sources_ns={0: 30})
    assert step_ns([_plan([0, 1], [bucket])], {}) == {0: 40, 1: 40}


def test_results_arrive_when_the_last_owner_has_sent_them():
    """Rank 1 owns nothing: it has its rows when rank 0 has sent them."""
    plan = _plan([0, 1], [BucketTimes({0: 1}, {0: 5}, {0: 5})])
    assert step_ns([plan], {}) == {0: 11, 1: 11}


def test_element_wise_passes_come_before_the_first_gather():
    """Momentum is updated before its rows are packed; others wait for a rank that does more."""
    plan = _plan([0, 1], [BucketTimes({0: 1}, {0: 5}, {0: 5})])
    assert step_ns([plan], {}, {0: 3, 1: 7}) == {0: 18, 1: 18}


def test_link_serves_first_what_starts_first():
    """A gather that waits for another rank leaves the link free for another plan's."""
    gathers = [BucketTimes({}, {0: 1, 1: 10}, {}), BucketTimes({}, {0: 1}, {})]
    plans = [
        _plan([0, 1], gathers, depth=2),
        _plan([0], [BucketTimes({0: 2}, {0: 1}, {})]),
    ]
    # Rank 0 has the rows of the first gather at 1, of the other plan at 2, and works until 4; the
    # second gather of both starts at 10, when rank 1 has the first.
    assert step_ns(plans[1:], {}) == {0: 3}
    assert step_ns(plans, {}) == {0: 11, 1: 11}


def test_schedule_that_never_ends_is_refused():
    """A gather that is never started would otherwise look like a short step."""
    plan = _plan([0, 1], [BucketTimes({0: 5}, {}, {})], depth=0)
    with pytest.raises(ValueError, match="expected 2 ranks to end, got 0"):
        step_ns([plan], {})


@given(st.lists(plan_orders(), min_size=3, max_size=3), st.integers(0, 3))
def test_ranks_with_other_plans_never_wait_for_each_other_for_ever(orders, num_last):
    """Two domains of experts in one of all ranks, in every mixture of buckets and replicas."""
    first, second, all_ranks = orders
    domains = [([0, 1], first), ([2, 3], second), ([0, 1, 2, 3], all_ranks)]
    plans = [
        PlanTimes(
            ranks,
            [
                BucketTimes(dict.fromkeys(ranks, 1 + number), {ranks[-1]: 2}, {}, {})
                for number in range(order.num_buckets)
            ],
            order,
        )
        for ranks, order in domains
    ]
    assert set(step_ns(plans, {0: num_last})) >= {0, 1, 2, 3}


def test_plans_that_alternate_are_faster_than_one_after_the_other():
    """Rank 0 has most experts, rank 1 most dense matrices; each waits for the other's results."""

    def plan(loads: list[int]) -> PlanTimes:
        traffic_ns = dict.fromkeys((0, 1), 5)
        bucket = BucketTimes(dict(enumerate(loads)), traffic_ns, traffic_ns)
        return _plan([0, 1], [bucket] * 4)

    plans = [plan([30, 10]), plan([10, 30])]
    alternating = max(step_ns(plans, {}).values())
    schedule._actions_of.cache_clear()
    with mock.patch.object(
        schedule,
        "rounds_of",
        lambda counts: [Round(p, i) for p, count in enumerate(counts) for i in range(count)],
    ):
        one_by_one = max(step_ns(plans, {}).values())
    schedule._actions_of.cache_clear()
    assert one_by_one > 1.2 * alternating and 160 < alternating < 190


def test_replicas_pass_on_one_scatter_while_the_next_one_is_in_flight():
    """Two owners, each with one bucket of two scatters; by hand."""
    both = dict.fromkeys((0, 1), 20)
    bucket = BucketTimes(dict.fromkeys((0, 1), 30), {}, {}, both)
    # Work until 30; each half is passed on for 10.
    assert step_ns([_plan([0, 1], [bucket], num_scatters=2)], {}) == {0: 50, 1: 50}
    # Replicas pass on what has arrived, not before.
    late = BucketTimes({0: 30}, {}, {0: 10}, both)
    assert step_ns([_plan([0, 1], [late], num_scatters=1)], {}) == {0: 60, 1: 60}
    # Of two buckets the first one's results are passed on while the second one is orthogonalized.
    twice = _plan([0, 1], [bucket] * 2, depth=2, num_scatters=1)
    assert step_ns([twice], {}) == {0: 80, 1: 80}


def test_rank_passes_results_on_in_the_order_in_which_it_starts_them():
    """Those of the second plan have arrived at 2, those of the first one at 5."""
    first = _plan([0, 1], [BucketTimes({0: 1, 1: 5}, {}, {})], num_scatters=1)
    second = _plan([0], [BucketTimes({0: 1}, {}, {}, {0: 2})], num_scatters=1)
    assert step_ns([second], {}) == {0: 3}
    assert step_ns([first, second], {}) == {0: 7, 1: 5}


@given(
    st.lists(plan_orders(), min_size=2, max_size=2),
    st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=4, max_size=4),
)
def test_ranks_with_the_same_times_end_when_each_is_run(orders, times):
    """Of two plans, one of half of the ranks.

    That one uses no links: of collectives that start at the same time the model serves any first.
    """
    load_ns, gather_ns, scatter_ns = (
        {rank: 12 * of_rank[kind] for rank, of_rank in enumerate(times)} for kind in range(3)
    )
    buckets = [
        BucketTimes(load_ns, gather_ns, scatter_ns, dict.fromkeys(range(4), 6)),
        BucketTimes(load_ns, {}, {}),
    ]
    plans = [
        PlanTimes(ranks, [bucket] * order.num_buckets, order)
        for ranks, bucket, order in zip(([0, 1, 2, 3], [1, 3]), buckets, orders, strict=True)
    ]
    assert step_ns(plans, load_ns) == step_estimate._Simulation(plans, load_ns, {}).run()


def test_ranks_with_the_same_times_are_run_once():
    """Of 1,000 ranks that own nothing and two that own as much, two are run."""
    bucket = BucketTimes({0: 10, 7: 10}, {0: 20, 7: 20}, {0: 20, 7: 20})
    with mock.patch.object(
        step_estimate, "_Simulation", wraps=step_estimate._Simulation
    ) as simulation:
        found = step_ns([_plan(range(1002), [bucket])], dict.fromkeys(range(1002), 4))
    (plan,), local_ns, _ = simulation.call_args.args
    assert plan.ranks == [0, 1] and local_ns == {0: 4, 1: 4}
    assert found == dict.fromkeys(range(1002), 50)
