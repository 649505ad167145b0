# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of a step, what of it is the same on all ranks, and how long it takes."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from helpers.planned import planned_in
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan import ExchangePlan, rank_schedule, schedule, step_estimate
from megatron_muon.plan.assignment import Assignment, assign
from megatron_muon.plan.bucket_memory import FullestRanks
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import staging_problem
from megatron_muon.plan.layout import MatrixLayout, whole_matrix
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import Machine, Parallelism, simulate
from megatron_muon.plan.rank_schedule import RankSchedule
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.schedule import (
    Action,
    Depth,
    PlanOrder,
    Round,
    actions_of,
    rounds_of,
)
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds, step_seconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire

_WIRE = Wire.of("bf16", is_bf16=True)
_ORDERS = (
    st.builds(
        PlanOrder,
        num_buckets=st.integers(0, 6),
        num_scatters=st.integers(1, 3),
        depth=st.builds(Depth, st.integers(1, 5), st.integers(1, 5)),
        has_replicas=st.just(True),
    )
    | st.builds(
        PlanOrder,
        num_buckets=st.integers(0, 6),
        num_scatters=st.just(1),
        depth=st.builds(Depth, st.integers(1, 5), st.integers(1, 5)),
        has_replicas=st.just(False),
    )
    | st.builds(
        PlanOrder,
        num_buckets=st.integers(0, 6),
        num_scatters=st.integers(2, 4),
        depth=st.builds(Depth, st.integers(1, 5), st.integers(1, 5)),
        has_replicas=st.booleans(),
        is_portioned=st.just(True),
    )
)


def _of_plan(orders: list[PlanOrder], plan: int) -> list[tuple[str, int]]:
    """Return what a rank does for one of its plans, in order."""
    actions = [action for action in actions_of(orders) if action.kind != "local"]
    return [(action.kind, action.number) for action in actions if action.plan == plan]


@given(st.lists(_ORDERS, min_size=1, max_size=3))
def test_order_of_a_plans_actions_does_not_depend_on_other_plans(orders):
    """Ranks of one plan may have other plans besides: otherwise they would wait for ever."""
    for plan, order in enumerate(orders):
        assert _of_plan(orders, plan) == _of_plan([order], 0)


@given(_ORDERS)
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


def _long_matrix(rows: int = 28672, cols: int = 4096) -> tuple[list[MatrixLayout], Assignment]:
    """Make a matrix on eight ranks, that the first one owns."""
    layout = rows_cut_at(rows, cols, [rows // 8] * 8)
    matrix = whole_matrix("fc1.weight", layout, [[(rank,) for rank in range(8)]])
    return [matrix], Assignment(((0,),), dict.fromkeys(range(8), 0.0), 1.0)


# Eight nodes. The matrix takes 21 ms, its rows 4.6 ms, its first product 1.9 ms.
_EIGHT_NODES = CostModel(ranks_per_node=1)


def test_portions_are_taken_where_they_shorten_the_step_by_enough():
    """Not where their gain is small, where they are not allowed, or where links are fast."""
    matrices, assignment = _long_matrix()

    def plan(cost: CostModel, *, may_portion: bool = True) -> ExchangePlan:
        return ExchangePlan.build(
            matrices, assignment, cost, _WIRE, staging_bytes=2**31, may_portion=may_portion
        )

    portioned, whole = plan(_EIGHT_NODES), plan(_EIGHT_NODES, may_portion=False)
    assert portioned.order.is_portioned and not whole.order.is_portioned
    assert portioned.predicted_step_s < 0.95 * whole.predicted_step_s
    assert portioned.bound_s < whole.bound_s
    fast = dataclasses.replace(_EIGHT_NODES, gbps_between_nodes=450.0)
    assert not plan(fast).order.is_portioned
    # A latency that eats the gain.
    late = dataclasses.replace(_EIGHT_NODES, all_reduce_us=300.0)
    assert not plan(late).order.is_portioned


def test_portions_do_not_change_what_is_taken_where_nothing_fits():
    """They take more memory; a plan that has none is not to suffer."""
    matrices, assignment = _long_matrix()
    plans = [
        ExchangePlan.build(
            matrices,
            assignment,
            _EIGHT_NODES,
            _WIRE,
            staging_bytes=1,
            is_limit=False,
            may_portion=may_portion,
        )
        for may_portion in (False, True)
    ]
    whole, portioned = plans
    # The room is that of the plan without portions; within it, these are chosen by the step.
    assert portioned.staging_bytes <= 1.1 * whole.staging_bytes
    assert portioned.predicted_step_s <= whole.predicted_step_s


def test_edges_and_sums_are_those_of_backends_that_take_portions():
    """By hand: a product has 2 n^2 m operations, an element of a sum 12 bytes."""
    cost = CostModel(kernel_us=0.0)
    n, m = 4096, 28672
    assert cost.edge_seconds(n, m) == pytest.approx(2 * n * n * m / 500e12)
    assert cost.edge_seconds(m, n, 2) == pytest.approx(n * n * m / 500e12)
    assert cost.portion_seconds(m, n) == pytest.approx(12 * n * n / 3350e9)
    symmetric = dataclasses.replace(cost, backends=("symmetric",))
    assert symmetric.edge_seconds(n, m) == symmetric.portion_seconds(n, m) == 0.0


def test_copies_of_a_matrix_have_no_edges():
    """They travel as a whole, in the first portion."""
    (matrix,), _ = _long_matrix(64, 32)
    copied = dataclasses.replace(matrix, has_copies=True)
    found, of_copies = (
        TravellingMatrix.of(0, each, (0,), CostModel(), _WIRE) for each in (matrix, copied)
    )
    assert found.edge_s > 0 and found.sum_s > 0
    assert of_copies.edge_s == of_copies.sum_s == 0.0
    # All of it, or up to 16 lines of 32 elements.
    assert of_copies.portion_excess(0) == (56 * 32, 0) and found.portion_excess(0) == (512, 0)
    assert of_copies.portion_excess(1) == (0, 8 * 32) and found.portion_excess(1) == (0, 256)


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


def _all_within(plan: ExchangePlan) -> bool:
    layouts = (RankSchedule.build([plan], rank).staging for rank in plan.plan_seconds.ranks)
    return all(layout.num_bytes <= plan.staging_bytes for layout in layouts)


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


@given(st.lists(_ORDERS, min_size=3, max_size=3), st.integers(0, 3))
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


@given(
    st.lists(_ORDERS, min_size=2, max_size=2),
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


def test_more_is_under_way_where_memory_allows_and_the_step_gains():
    """Half of the memory, as each of two kinds has it, leaves less; plenty changes nothing."""
    matrices = [
        whole_matrix(f"{index}.weight", rows_cut_at(48, 64, [24, 24]), [[(0,), (1,)]])
        for index in range(32)
    ]
    cost = CostModel(stack_tiles=1)
    assignment = assign(matrices, cost, _WIRE)
    half, whole, plenty = (
        ExchangePlan.build(matrices, assignment, cost, _WIRE, staging_bytes=limit)
        for limit in (25_000, 50_000, 2**31)
    )
    assert half.order.depth == (1, 1) and whole.order.depth == (2, 2)
    assert plenty.order == whole.order and plenty.staging_bytes < 50_000


def test_plans_of_a_rank_share_its_link():
    """Two gathers and two scatters of a second each, and nothing to compute."""
    plan = _seconds([0], [BucketSeconds({}, {0: 1.0}, {0: 1.0})])
    assert step_seconds([plan, plan], {}) == {0: 4.0}


def test_local_matrices_fill_the_end_too():
    """There the last results travel."""
    rank_plan = SimpleNamespace(bucket_load_s=(2.0, 1.0), local_load_s=(1.5, 1.0, 0.5))
    actions = [Action("orthogonalize", 0, 0), Action("orthogonalize", 0, 1)]
    first, second, end = rank_schedule._deal([rank_plan], actions)
    assert first == () and second == ((0, 1),) and end == ((0, 0), (0, 2))


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
