# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Offsets in staging memory: buffers that are alive at the same time do not overlap."""

from helpers.layouts import plan_orders
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan import CommDtypes
from megatron_muon.plan.schedule import Depth, PlanOrder, actions_of
from megatron_muon.plan.staging import (
    BucketSizes,
    PlanStaging,
    ScatterSizes,
    StagingLayout,
)

_SIZES = st.integers(0, 750)
FP32 = CommDtypes("float32", "float32")


@st.composite
def _plans(draw: st.DrawFn) -> list[PlanStaging]:
    """Draw up to two plans with buffers of any size."""
    plans = []
    for _ in range(draw(st.integers(0, 2))):
        order = draw(plan_orders())
        sizes = [BucketSizes(*(draw(_SIZES) for _ in range(3))) for _ in range(order.num_buckets)]
        scatters = [
            ScatterSizes(draw(_SIZES), draw(_SIZES))
            for _ in range(order.num_buckets * order.num_scatters)
        ]
        plans.append(PlanStaging(order, tuple(sizes), tuple(scatters), draw(_SIZES), FP32))
    return plans


def _moments(plans: list[PlanStaging], layout: StagingLayout) -> list[list[range]]:
    """Return the bytes that are in use at each action, from the list in plan/schedule.py."""

    def bytes_of(plan: int, kind: str, number: int, buffer: str) -> range:
        sizes, places = getattr(plans[plan], kind), getattr(layout.plans[plan], kind)
        first = getattr(places[number], buffer)
        return range(first, first + 4 * getattr(sizes[number], buffer))

    moments = []
    in_use: dict[tuple, range] = {}
    for action, plan, number in actions_of(tuple(each.order for each in plans)):
        ends: list[tuple] = []
        if action == "local":
            size = 4 * max((each.local for each in plans), default=0)
            in_use["local"] = range(layout.local[number], layout.local[number] + size)
            ends = ["local"]
        elif action == "start_gather":
            for buffer in ("gather_send", "gather_receive"):
                in_use[plan, "buckets", number, buffer] = bytes_of(plan, "buckets", number, buffer)
        elif action == "wait_for_gather":
            ends = [(plan, "buckets", number, "gather_send")]
        elif action == "orthogonalize":
            in_use[plan, "buckets", number, "stacks"] = bytes_of(plan, "buckets", number, "stacks")
            ends = [(plan, "buckets", number, each) for each in ("stacks", "gather_receive")]
        elif action == "start_scatter":
            for buffer in ("send", "receive"):
                in_use[plan, "scatters", number, buffer] = bytes_of(
                    plan, "scatters", number, buffer
                )
        elif action == "finish_scatter":
            ends = [(plan, "scatters", number, each) for each in ("send", "receive")]
        moments.append(list(in_use.values()))
        for key in ends:
            in_use.pop(key, None)
    assert not in_use
    return moments


@given(_plans())
def test_buffers_that_are_alive_together_do_not_overlap(plans):
    """All of them are within the arena, aligned; it is as large as the busiest moment at least."""
    layout = StagingLayout.build(plans)
    most = 0
    for in_use in _moments(plans, layout):
        used = sorted((place for place in in_use if place), key=lambda place: place.start)
        for first, second in zip(used, used[1:], strict=False):
            assert first.stop <= second.start
        assert all(place.start % 256 == 0 and place.stop <= layout.num_bytes for place in used)
        most = max(most, sum(-(-len(place) // 256) * 256 for place in used))
    assert most <= layout.num_bytes


def test_equal_buckets_need_six_buffers_however_many_they_are():
    """One gather and one scatter are in flight, one bucket is orthogonalized; the rest is free."""
    for count in (3, 4, 9):
        # While the stacks are filled: messages of the next gather, rows that arrived, stacks, and
        # messages of the scatter before.
        plan = PlanStaging(
            PlanOrder(count, 1, Depth(1, 1), False),
            (BucketSizes(256, 256, 256),) * count,
            (ScatterSizes(256, 256),) * count,
            0,
            FP32,
        )
        assert StagingLayout.build([plan]).num_bytes == 6 * 1024


def test_scatters_of_a_bucket_share_the_memory_of_replicas():
    """Eight scatters of an eighth each, two in flight: a quarter of what one scatter needs."""
    sizes = []
    for num_scatters in (1, 8):
        order = PlanOrder(1, num_scatters, Depth(1, 2), True)
        scatters = (ScatterSizes(0, 2048 // num_scatters),) * num_scatters
        plan = PlanStaging(order, (BucketSizes(0, 0, 0),), scatters, 0, FP32)
        sizes.append(StagingLayout.build([plan]).num_bytes)
    assert sizes == [8192, 2048]
