# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Offsets in staging memory: buffers that are alive at the same time do not overlap."""

from helpers.layouts import plan_orders, plans
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import CommDtypes, RankPlan
from megatron_muon.plan.schedule import PlanOrder, actions_of
from megatron_muon.plan.staging import BucketSizes, PlanStaging, StagingLayout

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
