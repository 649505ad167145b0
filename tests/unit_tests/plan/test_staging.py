# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Places of staging memory: what is alive together lies apart."""

from helpers.layouts import plan_orders
from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.stacking import stack_rooms

from megatron_muon.plan.schedule import Depth, PlanOrder, actions_of
from megatron_muon.plan.staging import (
    BucketSizes,
    PlanStaging,
    ScatterSizes,
    StagingLayout,
    most_alive,
)

_SIZES = st.integers(0, 3000)


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
        plans.append(PlanStaging(order, sizes, scatters, draw(_SIZES)))
    return plans


def _moments(plans: list[PlanStaging], layout: StagingLayout) -> list[list[range]]:
    """Return the bytes that are in use at each action, told from the list in plan/schedule.py."""

    def bytes_of(plan: int, kind: str, number: int, buffer: str) -> range:
        sizes, places = getattr(plans[plan], kind), getattr(layout.plans[plan], kind)
        first = getattr(places[number], buffer)
        return range(first, first + getattr(sizes[number], buffer))

    moments = []
    in_use: dict[tuple, range] = {}
    for action, plan, number in actions_of([each.order for each in plans]):
        order = plans[plan].order if plans else None
        ends: list[tuple] = []
        if action == "local":
            size = max((each.local_bytes for each in plans), default=0)
            in_use["local"] = range(layout.local[number], layout.local[number] + size)
            ends = ["local"]
        elif action == "start_gather":
            # All gathers of a bucket have one buffer each way.
            bucket = number // order.num_gathers
            for buffer in ("gather_send", "gather_receive"):
                in_use[plan, "buckets", bucket, buffer] = bytes_of(plan, "buckets", bucket, buffer)
        elif action == "wait_for_gather":
            bucket, portion = divmod(number, order.num_gathers)
            if portion == order.num_gathers - 1:
                ends = [(plan, "buckets", bucket, "gather_send")]
        elif action == "first_product":
            bucket = number // order.num_gathers
            in_use[plan, "buckets", bucket, "stacks"] = bytes_of(plan, "buckets", bucket, "stacks")
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
def test_buffers_that_are_alive_together_lie_apart(plans):
    """All of them lie in the arena, aligned; it is as large as the busiest moment at least."""
    layout = StagingLayout.build(plans)
    most = 0
    for in_use in _moments(plans, layout):
        used = sorted((place for place in in_use if place), key=lambda place: place.start)
        for first, second in zip(used, used[1:], strict=False):
            assert first.stop <= second.start
        assert all(place.start % 256 == 0 and place.stop <= layout.num_bytes for place in used)
        most = max(most, sum(-(-len(place) // 256) * 256 for place in used))
    assert most == most_alive(plans) <= layout.num_bytes


def test_equal_buckets_take_six_buffers_however_many_they_are():
    """One gather travels, one is orthogonalized, one scatter travels; the rest has been freed."""
    for count in (3, 4, 9):
        # While the stacks are filled: messages of the next gather, rows that arrived, stacks, and
        # messages of the scatter before.
        plan = PlanStaging(
            PlanOrder(count, 1, Depth(1, 1), False),
            [BucketSizes(*[1024] * 3)] * count,
            [ScatterSizes(1024, 1024)] * count,
            0,
        )
        assert StagingLayout.build([plan]).num_bytes == 6 * 1024


def test_scatters_of_a_bucket_share_the_memory_of_replicas():
    """Eight scatters of an eighth each, two under way: a quarter of what one scatter takes."""
    sizes = []
    for num_scatters in (1, 8):
        order = PlanOrder(1, num_scatters, Depth(1, 2), True)
        scatters = [ScatterSizes(0, 8192 // num_scatters)] * num_scatters
        sizes.append(StagingLayout.build([PlanStaging(order, [BucketSizes(0, 0, 0)], scatters, 0)]))
    assert [layout.num_bytes for layout in sizes] == [8192, 2048]


@given(st.integers(0, 500), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_stacks_are_powers_of_two_with_little_padding(num_matrices, largest):
    """They hold all matrices; only the last one may be padded, by a quarter at most."""
    rooms = stack_rooms(num_matrices, largest)
    assert all(room <= largest and room & (room - 1) == 0 for room in rooms)
    assert num_matrices <= sum(rooms) and bool(rooms) == bool(num_matrices)
    if rooms:
        assert sum(rooms[:-1]) < num_matrices
        in_last = num_matrices - sum(rooms[:-1])
        assert rooms[-1] <= 1.25 * in_last
    # As few calls as without padding, and a few small ones for what is left.
    assert len(rooms) <= num_matrices // largest + max(1, largest.bit_length() - 1)
