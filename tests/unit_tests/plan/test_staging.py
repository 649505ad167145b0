# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Places of staging memory: what is alive together lies apart."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.rank_plan import stack_rooms
from megatron_muon.plan.staging import BucketSizes, StagingLayout

_SIZES = st.integers(0, 3000)
_BUCKETS = st.lists(st.builds(BucketSizes, *[_SIZES] * 5), max_size=6)

# First and last moment of each buffer of bucket i, told by (round, moment) from the drawing in
# plan/staging.py.
_ALIVE = BucketSizes(
    gather_send=((-1, 1), (0, 0)),
    gather_receive=((-1, 1), (0, 2)),
    stacks=((0, 2), (0, 2)),
    scatter_send=((0, 4), (1, 3)),
    scatter_receive=((0, 4), (1, 3)),
)


def _buffers(
    buckets: list[BucketSizes], local: int, layout: StagingLayout
) -> list[tuple[range, range]]:
    """Return the moments and the bytes of every buffer."""
    found = []
    for index, (sizes, places) in enumerate(zip(buckets, layout.buckets, strict=True)):
        for size, place, (first, last) in zip(sizes, places, _ALIVE, strict=True):
            start, stop = (5 * (index + number) + moment for number, moment in (first, last))
            found.append((range(start, stop + 1), range(place, place + size)))
    assert len(layout.local) == max(1, len(buckets))
    for index, place in enumerate(layout.local):
        found.append((range(5 * index, 5 * index + 1), range(place, place + local)))
    return found


def _overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


@given(_BUCKETS, _SIZES)
def test_buffers_that_are_alive_together_lie_apart(buckets, local):
    """All of them lie in the arena, aligned; it is as large as the busiest moment at least."""
    layout = StagingLayout.build(buckets, local)
    buffers = _buffers(buckets, local, layout)
    for number, (moments, place) in enumerate(buffers):
        assert place.start % 256 == 0 and place.stop <= layout.num_bytes
        for other_moments, other in buffers[:number]:
            assert not (_overlap(moments, other_moments) and _overlap(place, other))
    busiest = [
        sum(len(place) for alive, place in buffers if moment in alive)
        for moment in range(-5, 5 * (len(buckets) + 2))
    ]
    assert layout.num_bytes >= max(busiest)


def test_equal_buckets_take_six_buffers_however_many_they_are():
    """One gather travels, one is orthogonalized, one scatter travels; the rest has been freed."""
    sizes = BucketSizes(*[1024] * 5)
    for count in (3, 4, 9):
        # While the stacks are filled: messages of the next gather, rows that arrived, stacks, and
        # messages of the scatter before.
        assert StagingLayout.build([sizes] * count, 0).num_bytes == 6 * 1024


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
