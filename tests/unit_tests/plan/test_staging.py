# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Places of staging memory: what is alive together lies apart."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.rank_plan import stack_rooms
from megatron_muon.plan.schedule import Depth, rounds_of
from megatron_muon.plan.staging import BucketSizes, PlanStaging, StagingLayout

_SIZES = st.integers(0, 3000)
_PLANS = st.lists(
    st.builds(
        PlanStaging,
        st.lists(st.builds(BucketSizes, *[_SIZES] * 5), max_size=6),
        _SIZES,
        st.builds(Depth, st.integers(1, 3), st.integers(1, 3)),
    ),
    max_size=2,
)


def _buffers(plans: list[PlanStaging], layout: StagingLayout) -> list[tuple[range, range]]:
    """Return the moments and the bytes of every buffer, told from the list in plan/schedule.py."""
    rounds = rounds_of([len(plan.buckets) for plan in plans])
    # A step is moment -1, five moments a round, and five at its end.
    last = 5 * len(rounds) + 3
    found = []
    for number, (plan, of_plan) in enumerate(zip(plans, layout.buckets, strict=True)):
        first = [5 * rounds.index((number, bucket)) for bucket in range(len(plan.buckets))]
        for bucket, (sizes, places) in enumerate(zip(plan.buckets, of_plan, strict=True)):
            now, before = first[bucket], bucket - plan.depth.ahead
            packed = first[before] + 1 if before >= 0 else -1
            after = first[bucket + plan.depth.behind :]
            applied = after[0] + 3 if after else last
            alive = BucketSizes(
                gather_send=(packed, now),
                gather_receive=(packed, now + 2),
                stacks=(now + 2, now + 2),
                scatter_send=(now + 4, applied),
                scatter_receive=(now + 4, applied),
            )
            for size, place, (start, stop) in zip(sizes, places, alive, strict=True):
                found.append((range(start, stop + 1), range(place, place + size)))
    assert len(layout.local) == len(rounds) + 1
    local = max((plan.local_bytes for plan in plans), default=0)
    for index, place in enumerate(layout.local):
        found.append((range(5 * index, 5 * index + 1), range(place, place + local)))
    return found


def _overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


@given(_PLANS)
def test_buffers_that_are_alive_together_lie_apart(plans):
    """All of them lie in the arena, aligned; it is as large as the busiest moment at least."""
    layout = StagingLayout.build(plans)
    buffers = _buffers(plans, layout)
    for number, (moments, place) in enumerate(buffers):
        assert place.start % 256 == 0 and place.stop <= layout.num_bytes
        for other_moments, other in buffers[:number]:
            assert not (_overlap(moments, other_moments) and _overlap(place, other))
    moments = {moment for alive, _ in buffers for moment in alive}
    busiest = [sum(len(place) for alive, place in buffers if moment in alive) for moment in moments]
    assert layout.num_bytes >= max(busiest)


def test_equal_buckets_take_six_buffers_however_many_they_are():
    """One gather travels, one is orthogonalized, one scatter travels; the rest has been freed."""
    sizes = BucketSizes(*[1024] * 5)
    for count in (3, 4, 9):
        # While the stacks are filled: messages of the next gather, rows that arrived, stacks, and
        # messages of the scatter before.
        plan = PlanStaging([sizes] * count, 0, Depth(1, 1))
        assert StagingLayout.build([plan]).num_bytes == 6 * 1024


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
