# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long a step takes by the model of ranks and links, mostly worked out by hand."""

import dataclasses
from collections.abc import Sequence
from unittest import mock

import pytest
from helpers.layouts import matrix_lists, plan_orders
from helpers.planned import assign
from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds, step_seconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix

from megatron_muon.plan import ExchangePlan, schedule, step_estimate
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.schedule import Depth, PlanOrder, Round
from megatron_muon.plan.wire import Wire

_WIRE = Wire.of("bf16", is_bf16=True)


def _seconds(
    ranks: Sequence[int], buckets: Sequence[BucketSeconds], depth: int = 1, num_scatters: int = 0
) -> PlanSeconds:
    """Return what a plan takes; with scatters given, replicas pass results on."""
    order = PlanOrder(len(buckets), num_scatters or 1, Depth(depth, depth), num_scatters > 0)
    return PlanSeconds(ranks, buckets, order)


def _step(
    local: list[float], work: list[list[float]], traffic: float = 0.0, depth: int = 1
) -> float:
    """Estimate a plan of several ranks, each of which has so much traffic in each bucket."""
    ranks = range(len(local))
    traffic_s = dict.fromkeys(ranks, traffic)
    buckets = [BucketSeconds(dict(enumerate(loads)), traffic_s, traffic_s) for loads in work]
    plan = _seconds(ranks, buckets, depth)
    return max(step_seconds([plan], dict(enumerate(local))).values())


def test_step_of_balanced_buckets_takes_as_long_as_the_work():
    """Local matrices fill what a rank has less of in a bucket; only the ends of traffic show."""
    assert _step([0, 0], [[1, 1], [1, 1], [1, 1]]) == 3
    assert _step([0, 3], [[1, 0], [1, 0], [1, 0]]) == 3
    assert _step([0, 0], [[1, 1], [1, 1]], traffic=0.5) == 0.5 + 2 + 0.5
    assert _step([2.0, 1.0], []) == 2


def test_step_of_unbalanced_buckets_waits_for_the_last_rank():
    """Three ranks that own one bucket each wait in turn, though each has as much to do.

    With all gathers and scatters under way, none waits.
    """
    work = [[3, 0, 0], [0, 3, 0], [0, 0, 3]]
    assert _step([0, 0, 0], work) > 5
    assert _step([0, 0, 0], work, depth=3) == 3


def test_links_carry_one_collective_at_a_time():
    """Two gathers at once take as long as one after the other; by hand."""
    # Gathers end at 2 and 4; the first result leaves at 3, when the link is busy until 4.
    assert _step([0], [[1], [1]], traffic=2.0, depth=2) == 2 + 2 + 2 + 2
    # Gathers end at 0.5 and 1, results leave at 1.5 and 2.5.
    assert _step([0], [[1], [1]], traffic=0.5, depth=2) == 0.5 + 1 + 1 + 0.5


def test_plans_of_a_rank_share_its_link():
    """Two gathers and two scatters of a second each, and nothing to compute."""
    plan = _seconds([0], [BucketSeconds({}, {0: 1.0}, {0: 1.0})])
    assert step_seconds([plan, plan], {}) == {0: 4.0}


def test_rows_arrive_when_their_holders_have_sent_all():
    """Rank 0 owns one matrix; rank 1, which holds it, sends for three seconds to others too."""
    bucket = BucketSeconds({0: 1.0}, {0: 2.0, 1: 3.0}, {}, sources_s={0: 3.0})
    assert step_seconds([_seconds([0, 1], [bucket])], {}) == {0: 4.0, 1: 4.0}
    # In two portions its rows are there at 1.5 and 3, the first product of the second is left.
    portioned = dataclasses.replace(bucket, load_s={0: 10.0}, edge_s={0: 2.0})
    order = PlanOrder(1, 2, Depth(1, 2), False, is_portioned=True)
    assert step_seconds([PlanSeconds([0, 1], [portioned], order)], {})[0] == 3 + 1 + 6 + 2


def test_results_arrive_when_the_last_owner_has_sent_them():
    """Rank 1 owns nothing: it has its rows when rank 0 has sent them."""
    plan = _seconds([0, 1], [BucketSeconds({0: 1.0}, {0: 5.0}, {0: 5.0})])
    assert step_seconds([plan], {}) == {0: 11.0, 1: 11.0}


def test_link_serves_first_what_starts_first():
    """A gather that waits for another rank leaves the link free for another plan's."""
    gathers = [BucketSeconds({}, {0: 1.0, 1: 10.0}, {}), BucketSeconds({}, {0: 1.0}, {})]
    plans = [
        _seconds([0, 1], gathers, depth=2),
        _seconds([0], [BucketSeconds({0: 2.0}, {0: 1.0}, {})]),
    ]
    # Rank 0 has the rows of the first gather at 1, of the other plan at 2, and works until 4; the
    # second gather of both starts at 10, when rank 1 has the first.
    assert step_seconds(plans[1:], {}) == {0: 3.0}
    assert step_seconds(plans, {}) == {0: 11.0, 1: 11.0}


def test_schedule_that_never_ends_is_refused():
    """A gather that is never started would otherwise look like a short step."""
    plan = _seconds([0, 1], [BucketSeconds({0: 5.0}, {}, {})], depth=0)
    with pytest.raises(ValueError, match="expected 2 ranks to end, got 0"):
        step_seconds([plan], {})


@given(st.lists(plan_orders(), min_size=3, max_size=3), st.integers(0, 3))
def test_ranks_with_other_plans_never_wait_for_each_other_for_ever(orders, num_last):
    """Two domains of experts in one of all ranks, in every mixture of buckets and replicas."""
    first, second, all_ranks = orders
    domains = [([0, 1], first), ([2, 3], second), ([0, 1, 2, 3], all_ranks)]
    plans = [
        PlanSeconds(
            ranks,
            [
                BucketSeconds(dict.fromkeys(ranks, 1.0 + number), {ranks[-1]: 2.0}, {}, {})
                for number in range(order.num_buckets)
            ],
            order,
        )
        for ranks, order in domains
    ]
    assert set(step_seconds(plans, {0: float(num_last)})) >= {0, 1, 2, 3}


def test_kinds_that_take_turns_are_faster_than_one_after_the_other():
    """Rank 0 has most experts, rank 1 most dense matrices; each waits for the other's results."""

    def plan(loads: list[float]) -> PlanSeconds:
        traffic_s = dict.fromkeys((0, 1), 0.5)
        bucket = BucketSeconds(dict(enumerate(loads)), traffic_s, traffic_s)
        return _seconds([0, 1], [bucket] * 4)

    plans = [plan([3.0, 1.0]), plan([1.0, 3.0])]
    in_turns = max(step_seconds(plans, {}).values())
    schedule._actions_of.cache_clear()
    with mock.patch.object(
        schedule,
        "rounds_of",
        lambda counts: [Round(p, i) for p, count in enumerate(counts) for i in range(count)],
    ):
        in_turn_s = max(step_seconds(plans, {}).values())
    schedule._actions_of.cache_clear()
    assert in_turn_s > 1.2 * in_turns
    assert 16 < in_turns < 19


def test_first_and_last_product_of_a_portioned_bucket_hide_its_own_traffic():
    """One matrix on one rank, in two portions; by hand."""
    bucket = BucketSeconds({0: 10.0}, {0: 4.0}, {0: 4.0}, edge_s={0: 2.0})

    def seconds(num_portions: int, behind: int = 2) -> float:
        depth = Depth(1, behind)
        order = PlanOrder(1, num_portions, depth, False, is_portioned=num_portions > 1)
        return step_seconds([PlanSeconds([0], [bucket], order)], {})[0]

    assert seconds(1) == 4 + 10 + 4
    # Half of the rows are there at 2, their product at 3; the others at 4 and 5. Six seconds later
    # the first results are computed until 12, and travel until 14, the others until 16.
    assert seconds(2) == 5 + 6 + 1 + 2 + 2
    assert seconds(4) == 4.5 + 6 + 0.5 + 4
    # With one scatter at a time, the next one starts when it has ended; the last product does not
    # wait.
    assert seconds(2, behind=1) == seconds(2)

    # Each portion adds to a sum: the first one while others travel, the last one does not.
    adding = dataclasses.replace(bucket, sum_s={0: 0.5})
    order = PlanOrder(1, 2, Depth(1, 2), False, is_portioned=True)
    assert step_seconds([PlanSeconds([0], [adding], order)], {})[0] == seconds(2) + 0.5


def test_replicas_pass_on_one_scatter_while_the_next_one_travels():
    """Two owners, each with one bucket of two scatters; by hand."""
    both = dict.fromkeys((0, 1), 2.0)
    bucket = BucketSeconds(dict.fromkeys((0, 1), 3.0), {}, {}, both)
    # Work until 3; each half is passed on for a second.
    assert step_seconds([_seconds([0, 1], [bucket], num_scatters=2)], {}) == {0: 5.0, 1: 5.0}
    # Replicas pass on what has arrived, not before.
    late = BucketSeconds({0: 3.0}, {}, {0: 1.0}, both)
    assert step_seconds([_seconds([0, 1], [late], num_scatters=1)], {}) == {0: 6.0, 1: 6.0}
    # Of two buckets the first one's results are passed on while the second one is orthogonalized.
    twice = _seconds([0, 1], [bucket] * 2, depth=2, num_scatters=1)
    assert step_seconds([twice], {}) == {0: 3 + 3 + 2, 1: 3 + 3 + 2}


def test_rank_passes_results_on_in_the_order_in_which_it_starts_them():
    """Those of the second plan have arrived at 2, those of the first one at 5."""
    first = _seconds([0, 1], [BucketSeconds({0: 1.0, 1: 5.0}, {}, {})], num_scatters=1)
    second = _seconds([0], [BucketSeconds({0: 1.0}, {}, {}, {0: 2.0})], num_scatters=1)
    assert step_seconds([second], {}) == {0: 3.0}
    assert step_seconds([first, second], {}) == {0: 7.0, 1: 5.0}


@given(
    st.lists(plan_orders(), min_size=2, max_size=2),
    st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=4, max_size=4),
)
def test_ranks_that_take_the_same_end_when_each_is_run(orders, seconds):
    """Of two plans, one of half of the ranks.

    That one uses no links: of collectives that start at the same time the model serves any first.
    """
    load_s, gather_s, scatter_s = (
        {rank: float(each[kind]) for rank, each in enumerate(seconds)} for kind in range(3)
    )
    buckets = [
        BucketSeconds(load_s, gather_s, scatter_s, dict.fromkeys(range(4), 0.5)),
        BucketSeconds(load_s, {}, {}),
    ]
    plans = [
        PlanSeconds(ranks, [bucket] * order.num_buckets, order)
        for ranks, bucket, order in zip(([0, 1, 2, 3], [1, 3]), buckets, orders, strict=True)
    ]
    assert step_seconds(plans, load_s) == step_estimate._Simulation(plans, load_s).run()


def test_ranks_that_take_the_same_are_run_once():
    """Of 1,000 ranks that own nothing and two that own as much, two are run."""
    bucket = BucketSeconds({0: 1.0, 7: 1.0}, {0: 2.0, 7: 2.0}, {0: 2.0, 7: 2.0})
    with mock.patch.object(
        step_estimate, "_Simulation", wraps=step_estimate._Simulation
    ) as simulation:
        found = step_seconds([_seconds(range(1002), [bucket])], dict.fromkeys(range(1002), 0.5))
    (plan,), local_load_s = simulation.call_args.args
    assert plan.ranks == [0, 1] and local_load_s == {0: 0.5, 1: 0.5}
    assert found == dict.fromkeys(range(1002), 5.0)


@given(
    st.lists(matrix_lists(max_matrices=8), min_size=1, max_size=2),
    st.sampled_from([1, 5000, 2**31]),
    st.booleans(),
)
def test_no_step_is_shorter_than_the_bound(lists, staging_bytes, may_portion):
    """And every schedule of random plans ends."""
    # Links so slow that portions pay.
    cost = CostModel(gbps=1.0, gbps_between_nodes=1.0, all_reduce_us=0.0, stack_tiles=4)
    for matrices in lists:
        assignment = assign(matrices, cost, _WIRE)
        plan = ExchangePlan.build(
            matrices,
            assignment,
            cost,
            _WIRE,
            staging_bytes=staging_bytes,
            may_portion=may_portion,
        )
        assert plan.predicted_step_s >= plan.bound_s * (1 - 1e-9)
        assert plan.bound_s >= max(assignment.load_s.values()) * (1 - 1e-9)


@given(matrix_lists(max_matrices=6))
def test_traffic_of_an_owner_is_that_of_the_routes(matrices):
    """Replicas included: the nearest sends rows, and gets results."""
    cost = CostModel(ranks_per_node=2)
    owners = assign(matrices, cost, _WIRE, max_parts=1).owners
    for index, (matrix, (owner,)) in enumerate(zip(matrices, owners, strict=True)):
        found = TravellingMatrix.of(index, matrix, (owner,), cost, _WIRE)
        seconds = sum(
            2 * transfer.num_elements * cost.seconds_per_byte(transfer.source, owner)
            for transfer in transfers_of(index, matrix, (owner,), cost)
            if transfer.source != owner
        )
        assert found.gather_s[owner] == pytest.approx(seconds)
        assert found.scatter_s[owner] == pytest.approx(seconds)
