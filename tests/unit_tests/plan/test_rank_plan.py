# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What one rank does: messages, stacks, their order, and their places in staging memory."""

from collections import Counter, defaultdict
from unittest import mock

from helpers.layouts import (
    matrix_lists,
    one_matrix,
    plan_of,
    plan_orders,
    plans,
    rows_cut_at,
    whole_matrix,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import CommDtypes, RankPlan
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.owners import Assignment
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.plan.schedule import DEPTH, PlanOrder, actions_of, rounds_of
from megatron_muon.plan.staging import BucketSizes, PlanStaging, StagingLayout


@settings(max_examples=50)
@given(plans())
def test_messages_of_two_ranks_match(plan):
    """What a rank sends is what its peer expects, route by route, in the counted sizes."""
    rank_plans = {rank: RankPlan.build(plan, rank) for rank in plan.ranks}
    nothing = BucketSizes(0, 0, 0, 0, 0)
    for number, indices in enumerate(plan.buckets):
        sizes = plan.sizes.sizes(indices)
        assert set(sizes) <= set(plan.ranks)
        buckets = {rank: rank_plans[rank].buckets[number] for rank in plan.ranks}
        any_rows = any(bucket.sends for bucket in buckets.values())
        assert len({bucket.has_gather for bucket in buckets.values()}) == 1
        for sender, mine in buckets.items():
            assert sender not in mine.sends and mine.has_gather >= any_rows
            assert sizes.get(sender, nothing) == mine.num_elements
            for receiver, theirs in buckets.items():
                assert mine.sends.get(receiver, []) == theirs.receives.get(sender, [])
                results = mine.scatter.sends.get(receiver, [])
                elements = sum(route.num_elements for route in results)
                assert elements == theirs.scatter.receives.get(sender, 0)


@settings(max_examples=50)
@given(plans(max_matrices=12))
def test_every_matrix_is_orthogonalized_by_its_owners_alone_in_one_order(plan):
    """Every matrix is in a stack of its owners alone, which see split ones in one order."""
    found: Counter[tuple[int, int, int]] = Counter()
    orders: dict[tuple[int, tuple[int, ...]], set[tuple]] = defaultdict(set)
    for rank in plan.ranks:
        rank_plan = RankPlan.build(plan, rank)
        buckets = [bucket.owned for bucket in rank_plan.buckets]
        for stack in (stack for owned in [*rank_plan.local, *buckets] for stack in owned.stacks):
            found.update((part.matrix, part.block, rank) for part in stack)
            assert len({(part.num_rows, part.num_cols) for part in stack}) == 1
        for number, owned in enumerate(buckets):
            split = [stack[0] for stack in owned.stacks if len(stack[0].owners) > 1]
            assert split == [stack[0] for stack in owned.stacks][: len(split)]
            for owners in plan.sets_of_owners:
                if rank in owners:
                    blocks = tuple((p.matrix, p.block) for p in split if p.owners == owners)
                    orders[number, owners].add(blocks)
    assert found == Counter(
        (index, block, owner)
        for index, owners in enumerate(plan.owners)
        for block in range(len(plan.matrices[index].blocks))
        for owner in owners
    )
    assert all(len(of_ranks) == 1 for of_ranks in orders.values())


def test_matrix_split_over_its_replicas_is_not_local():
    """A matrix split over its replicas is exchanged, and not local."""
    matrix = whole_matrix("a.weight", rows_cut_at(8, 4, [8]), [[(0, 1)]])
    assignment = Assignment(((0, 1),), {0: 1, 1: 1})
    with mock.patch("megatron_muon.plan.exchange_plan.choose_owners", lambda *_: assignment):
        plan = plan_of([matrix], staging_bytes=5000)
    assert plan.local == () and plan.buckets == ((0,),)
    (bucket,) = RankPlan.build(plan, 0).buckets
    assert [part.num_rows for stack in bucket.owned.stacks for part in stack] == [4]
    assert not bucket.has_gather
    # Both keep their 16 elements, and pass them on.
    assert list(bucket.scatter.sends) == [0] and bucket.scatter.receives == {0: 16}
    assert bucket.scatter.shard.section_size == 16


@settings(max_examples=15)
@given(st.lists(matrix_lists(), min_size=1, max_size=2))
def test_every_local_stack_has_one_turn(lists):
    """Every local stack has one turn, in a round or at the end."""
    built = [plan_of(matrices, staging_bytes=1) for matrices in lists]
    for rank in built[0].ranks:
        schedule = RankSchedule.build(built, rank)
        turns = [action.number for action in schedule.actions if action.kind == "local"]
        assert turns == list(range(len(schedule.local)))
        assert len(schedule.local) == len(schedule.staging.local)
        assert Counter(stack for stacks in schedule.local for stack in stacks) == Counter(
            (plan, number)
            for plan, rank_plan in enumerate(schedule.rank_plans)
            for number, _ in enumerate(rank_plan.local)
        )


def test_local_matrices_are_spread_over_the_rounds_and_the_end():
    """Local matrices are spread over all rounds and the end."""
    local = [one_matrix([64, 0], name=f"local.{i}") for i in range(8)]
    shared = [one_matrix([32, 32], name=f"shared.{i}") for i in range(20)]
    plan = plan_of([*local, *shared], CostModel(stack_tiles=1), num_buckets=3)
    assert len(plan.buckets) == 3 and len(plan.local) == 8
    schedule = RankSchedule.build([plan], 0)
    assert [len(stacks) for stacks in schedule.local] == [2, 2, 2, 2]


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


_SIZES = st.integers(0, 750)
FP32 = CommDtypes("float32", "float32")


@st.composite
def _plans(draw: st.DrawFn) -> list[PlanStaging]:
    """Draw up to two plans with buffers of any size."""
    plans = []
    for _ in range(draw(st.integers(0, 2))):
        order = draw(plan_orders())
        sizes = [BucketSizes(*(draw(_SIZES) for _ in range(5))) for _ in range(order.num_buckets)]
        plans.append(PlanStaging(order, tuple(sizes), draw(_SIZES), FP32))
    return plans


# By kind of an action: buffers of its bucket that come into use, and those that end with it.
_BUFFERS: dict[str, tuple[list[str], list[str]]] = {
    "start_gather": (["gather_send", "gather_receive"], []),
    "wait_for_gather": ([], ["gather_send"]),
    "orthogonalize": (["stacks"], ["gather_receive"]),
    "start_scatter": (["scatter_send", "scatter_receive"], ["stacks"]),
    "finish_scatter": ([], ["scatter_send", "scatter_receive"]),
}


def _moments(plans: list[PlanStaging], layout: StagingLayout) -> list[list[range]]:
    """Return the bytes that are in use at each action, from the list in plan/schedule.py."""
    local_bytes = 4 * max((each.local for each in plans), default=0)
    moments = []
    in_use: dict[tuple, range] = {}
    for action, plan, number in actions_of(tuple(each.order for each in plans)):
        if action == "local":
            place = layout.local[number]
            moments.append([*in_use.values(), range(place, place + local_bytes)])
            continue
        begins, ends = _BUFFERS[action]
        sizes, places = plans[plan].buckets[number], layout.plans[plan][number]
        for buffer in begins:
            first = getattr(places, buffer)
            in_use[plan, number, buffer] = range(first, first + 4 * getattr(sizes, buffer))
        moments.append(list(in_use.values()))
        for buffer in ends:
            del in_use[plan, number, buffer]
    assert not in_use
    return moments


@given(_plans())
def test_buffers_that_are_alive_together_do_not_overlap(plans):
    """Buffers that are alive together are apart, aligned, and within the arena."""
    layout = StagingLayout.build(plans)
    most = 0
    for in_use in _moments(plans, layout):
        used = sorted((place for place in in_use if place), key=lambda place: place.start)
        for first, second in zip(used, used[1:], strict=False):
            assert first.stop <= second.start
        assert all(place.start % 256 == 0 and place.stop <= layout.num_bytes for place in used)
        most = max(most, sum(-(-len(place) // 256) * 256 for place in used))
    assert most <= layout.num_bytes


@settings(max_examples=50)
@given(plans())
def test_staging_bytes_of_a_plan_are_those_of_its_fullest_rank(plan):
    """The staging bytes of a plan are those that its fullest rank allocates."""
    staging = [RankPlan.build(plan, rank).staging(plan.dtypes) for rank in plan.ranks]
    assert plan.staging_bytes == max(StagingLayout.build([each]).num_bytes for each in staging)


def test_equal_buckets_need_ten_buffers_however_many_they_are():
    """Any number of equal buckets needs ten buffers."""
    for count in (5, 6, 9):
        # While the stacks are filled: messages of the next gathers, rows that arrived, stacks, and
        # messages of the scatters before.
        plan = PlanStaging(
            PlanOrder(count, False),
            (BucketSizes(256, 256, 256, 256, 256),) * count,
            0,
            FP32,
        )
        assert StagingLayout.build([plan]).num_bytes == 10 * 1024


def test_results_of_two_buckets_are_in_memory_at_a_time():
    """Results of at most two buckets are in memory at a time."""
    sizes = []
    for count in (1, 8):
        sections = BucketSizes(0, 0, 0, 0, 2048 // count)
        plan = PlanStaging(PlanOrder(count, True), (sections,) * count, 0, FP32)
        sizes.append(StagingLayout.build([plan]).num_bytes)
    assert sizes == [8192, 2048]
