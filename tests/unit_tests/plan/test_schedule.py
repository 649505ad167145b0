# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order of a step, what of it is the same on all ranks, and how long it takes."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import ExchangePlan, rank_schedule, step_estimate
from megatron_muon.plan.assignment import assign
from megatron_muon.plan.buckets import TravellingMatrix
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import whole_matrix
from megatron_muon.plan.rank_schedule import RankSchedule
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.schedule import (
    Depth,
    Round,
    finished_after,
    finished_in_round,
    rounds_of,
    started_before,
    started_in_round,
)
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds, step_seconds
from megatron_muon.plan.wire import Wire

_DEPTHS = st.builds(Depth, st.integers(1, 5), st.integers(1, 5))
_WIRE = Wire.of("bf16", is_bf16=True)


def _collectives(num_buckets: list[int], depths: list[Depth], plan: int) -> list[str]:
    """Return the collectives of one plan, in the order in which a rank of it launches them."""
    log = [f"gather {i}" for i in started_before(num_buckets[plan], depths[plan])]
    for turn in rounds_of(num_buckets):
        if turn.plan == plan:
            started = started_in_round(turn.bucket, num_buckets[plan], depths[plan])
            log += [f"gather {started}"] * (started is not None)
            log.append(f"scatter {turn.bucket}")
    return log


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.data())
def test_order_of_a_plans_collectives_does_not_depend_on_other_plans(num_buckets, data):
    """Ranks of one plan may have other plans besides: otherwise they would wait for ever."""
    depths = [data.draw(_DEPTHS) for _ in num_buckets]
    for plan, number in enumerate(num_buckets):
        log = _collectives(num_buckets, depths, plan)
        assert log == _collectives([number], [depths[plan]], 0)
        # Each gather starts once, before its bucket is orthogonalized and its results leave.
        assert Counter(log) == Counter(
            f"{kind} {bucket}" for kind in ("gather", "scatter") for bucket in range(number)
        )
        for bucket in range(number):
            assert log.index(f"gather {bucket}") < log.index(f"scatter {bucket}")


@given(st.integers(0, 9), _DEPTHS)
def test_each_scatter_is_waited_for_once(num_buckets, depth):
    """After it was launched; no more are under way than the depth says."""
    waited = []
    for bucket in range(num_buckets):
        finished = finished_in_round(bucket, depth)
        waited += [] if finished is None else [finished]
        assert bucket - len(waited) < depth.behind
    assert [*waited, *finished_after(num_buckets, depth)] == list(range(num_buckets))


def test_plans_get_through_their_buckets_evenly():
    """Two buckets of one plan come at a quarter and three quarters of the other's."""
    assert rounds_of([4, 2]) == ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3))
    assert rounds_of([0, 2]) == ((1, 0), (1, 1)) and rounds_of([0]) == ()


@settings(deadline=None)
@given(st.lists(matrix_lists(max_matrices=8), min_size=1, max_size=2))
def test_every_local_stack_has_one_turn(lists):
    """In a round, or at the end; with its memory."""
    cost = CostModel(stack_tiles=4)
    plans = [
        ExchangePlan.build(matrices, assign(matrices, cost, _WIRE), cost, _WIRE, bucket_numel=500)
        for matrices in lists
    ]
    for rank in plans[0].matrices[0].ranks:
        schedule = RankSchedule.build(plans, rank)
        assert len(schedule.local) == len(schedule.rounds) + 1 == len(schedule.staging.local)
        assert Counter(stack for stacks in schedule.local for stack in stacks) == Counter(
            (plan, number)
            for plan, rank_plan in enumerate(schedule.rank_plans)
            for number, _ in enumerate(rank_plan.local)
        )


def _step(
    local: list[float], work: list[list[float]], traffic: float = 0.0, depth: int = 1
) -> float:
    """Estimate a plan of several ranks, each of which has so much traffic in each bucket."""
    ranks = range(len(local))
    traffic_s = dict.fromkeys(ranks, traffic)
    buckets = [BucketSeconds(dict(enumerate(loads)), traffic_s, traffic_s) for loads in work]
    plan = PlanSeconds(ranks, buckets, Depth(depth, depth))
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
    plan = PlanSeconds([0, 1], [BucketSeconds({0: 1.0}, {0: 5.0}, {0: 5.0})], Depth(1, 1))
    assert step_seconds([plan], {}) == {0: 11.0, 1: 11.0}


def test_link_serves_first_what_starts_first():
    """A gather that waits for another rank leaves the link free for another plan's."""
    gathers = [BucketSeconds({}, {0: 1.0, 1: 10.0}, {}), BucketSeconds({}, {0: 1.0}, {})]
    plans = [
        PlanSeconds([0, 1], gathers, Depth(2, 2)),
        PlanSeconds([0], [BucketSeconds({0: 2.0}, {0: 1.0}, {})], Depth(1, 1)),
    ]
    # Rank 0 has the rows of the first gather at 1, of the other plan at 2, and works until 4; the
    # second gather of both starts at 10, when rank 1 has the first.
    assert step_seconds(plans[1:], {}) == {0: 3.0}
    assert step_seconds(plans, {}) == {0: 11.0, 1: 11.0}


def test_schedule_that_never_ends_is_refused():
    """A gather that is never started would otherwise look like a short step."""
    plan = PlanSeconds([0, 1], [BucketSeconds({0: 5.0}, {}, {})], Depth(0, 1))
    with pytest.raises(ValueError, match="expected 2 ranks to end, got 0"):
        step_seconds([plan], {})


def test_kinds_that_take_turns_are_faster_than_one_after_the_other():
    """Rank 0 has most experts, rank 1 most dense matrices; each waits for the other's results."""

    def plan(loads: list[float]) -> PlanSeconds:
        traffic_s = dict.fromkeys((0, 1), 0.5)
        bucket = BucketSeconds(dict(enumerate(loads)), traffic_s, traffic_s)
        return PlanSeconds([0, 1], [bucket] * 4, Depth(1, 1))

    plans = [plan([3.0, 1.0]), plan([1.0, 3.0])]
    in_turns = max(step_seconds(plans, {}).values())
    with mock.patch.object(
        step_estimate,
        "rounds_of",
        lambda counts: [Round(p, i) for p, count in enumerate(counts) for i in range(count)],
    ):
        assert max(step_seconds(plans, {}).values()) > 1.2 * in_turns
    assert 16 < in_turns < 19


@settings(deadline=None)
@given(
    st.lists(matrix_lists(max_matrices=8), min_size=1, max_size=2),
    st.sampled_from([200, 500, 5000]),
)
def test_no_step_is_shorter_than_the_bound(lists, bucket_numel):
    """And every schedule of random plans ends."""
    cost = CostModel(stack_tiles=4)
    for matrices in lists:
        assignment = assign(matrices, cost, _WIRE)
        plan = ExchangePlan.build(matrices, assignment, cost, _WIRE, bucket_numel=bucket_numel)
        assert plan.predicted_step_s >= plan.bound_s * (1 - 1e-9)
        assert plan.bound_s >= max(assignment.load_s.values()) * (1 - 1e-9)


@settings(deadline=None)
@given(matrix_lists(max_matrices=12), st.sampled_from([200, 500, 5000]), st.sampled_from([1, 2]))
def test_more_buckets_are_under_way_only_where_they_fit(matrices, bucket_numel, num_kinds):
    """Eight buckets in all, shared by the kinds, but for alignment and the padding of stacks."""
    cost = CostModel(stack_tiles=1)
    plan = ExchangePlan.build(
        matrices, assign(matrices, cost, _WIRE), cost, _WIRE,
        bucket_numel=bucket_numel, num_kinds=num_kinds,
    )  # fmt: skip
    if plan.depth != (1, 1):
        for rank in matrices[0].ranks:
            staged = RankSchedule.build([plan], rank).staging.num_bytes
            # Five buffers a bucket, each aligned; parts of split matrices are rounded to rows.
            rounding = len(plan.buckets) * 5 * 256 + 2000
            assert staged <= 8 * 2 * bucket_numel // num_kinds + rounding


@settings(deadline=None)
@given(matrix_lists(max_matrices=10), matrix_lists(max_matrices=10), st.sampled_from([200, 5000]))
def test_two_kinds_stage_no_more_than_the_document_says(experts, dense, bucket_numel):
    """README: 24 bytes for each of max_numel elements, without replicas; less where more fit."""
    cost = CostModel(stack_tiles=1)
    plans = [
        ExchangePlan.build(
            matrices, assign(matrices, cost, _WIRE), cost, _WIRE,
            bucket_numel=bucket_numel, num_kinds=2,
        )
        for matrices in (experts, dense)
    ]  # fmt: skip
    if any(len(region.holders) > 1 for m in (*experts, *dense) for region in m.regions):
        return
    max_numel = max(plan.max_numel for plan in plans)
    for rank in {*experts[0].ranks, *dense[0].ranks}:
        # What a rank holds of a bucket may exceed what it owns of it: its rows are in max_numel
        # only where owners are as many as holders.
        held = max(
            sum(plan.matrices[i].elements_by_rank.get(rank, 0) for i in bucket)
            for plan in plans
            for bucket in plan.buckets or [()]
        )
        rounding = sum(len(plan.buckets) for plan in plans) * 5 * 256 + 4000
        of_plans = [plan for plan in plans if rank in plan.matrices[0].ranks]
        staged = RankSchedule.build(of_plans, rank).staging.num_bytes
        assert staged <= 24 * max(max_numel, held) + rounding


def test_kinds_share_the_memory_for_what_is_under_way():
    """With two kinds a plan has half of it, so fewer of its buckets are under way."""
    matrices = [
        whole_matrix(f"{index}.weight", rows_cut_at(48, 64, [24, 24]), [[(0,), (1,)]])
        for index in range(32)
    ]
    cost = CostModel(stack_tiles=1)
    assignment = assign(matrices, cost, _WIRE)
    one, two = (
        ExchangePlan.build(
            matrices, assignment, cost, _WIRE, bucket_numel=2 * 48 * 64, num_kinds=num_kinds
        )
        for num_kinds in (1, 2)
    )
    assert one.buckets == two.buckets and one.depth > two.depth


def test_plans_of_a_rank_share_its_link():
    """Two gathers and two scatters of a second each, and nothing to compute."""
    plan = PlanSeconds([0], [BucketSeconds({}, {0: 1.0}, {0: 1.0})], Depth(1, 1))
    assert step_seconds([plan, plan], {}) == {0: 4.0}


def test_local_matrices_fill_the_end_too():
    """There the last results travel."""
    rank_plan = SimpleNamespace(bucket_load_s=(2.0, 1.0), local_load_s=(1.5, 1.0, 0.5))
    rounds = rounds_of([2])
    first, second, end = rank_schedule._deal([rank_plan], rounds)
    assert first == () and second == ((0, 1),) and end == ((0, 0), (0, 2))


@settings(deadline=None)
@given(matrix_lists(max_matrices=6))
def test_traffic_of_an_owner_is_that_of_the_routes(matrices):
    """Replicas included: the nearest sends rows, all receive results."""
    cost = CostModel(ranks_per_node=2)
    owners = assign(matrices, cost, _WIRE, max_parts=1).owners
    for index, (matrix, (owner,)) in enumerate(zip(matrices, owners, strict=True)):
        found = TravellingMatrix.of(index, matrix, (owner,), cost, _WIRE)
        gather_s = scatter_s = 0.0
        for transfer in transfers_of(index, matrix, (owner,), cost):
            byte_s = cost.seconds_per_byte(transfer.holder, owner)
            gather_s += 2 * transfer.gathered * byte_s
            scatter_s += 2 * transfer.scattered * byte_s
        assert found.gather_s[owner] == pytest.approx(gather_s)
        assert found.scatter_s[owner] == pytest.approx(scatter_s)
