# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks in the order of numbers that change."""

from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.rank_heap import RankHeap

_VALUES = st.sampled_from([0.0, 0.5, 1.0, 2.0])


@given(
    st.lists(_VALUES, min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), _VALUES), max_size=12),
    st.booleans(),
    st.integers(1, 9),
)
def test_ranks_come_in_the_order_of_their_numbers(values, changes, is_descending, count):
    """After any changes, also to a number that a rank had before, and after looking."""
    now = dict(enumerate(values))
    heap = RankHeap(now, now, is_descending=is_descending)
    sign = -1 if is_descending else 1
    for rank, value in [(0, now[0]), *changes]:
        if rank in now:
            now[rank] = value
            heap.push(rank)
        ordered = sorted(now, key=lambda each: (sign * now[each], each))
        assert heap.first() == ordered[0]
        assert heap.first_few(count) == ordered[:count]


def test_ranks_that_are_left_out_never_come():
    """Numbers are those of all ranks."""
    heap = RankHeap({0: 1.0, 1: 0.0, 2: 3.0}, [0, 2])
    assert heap.first() == 0 and heap.first_few(3) == [0, 2]
    assert RankHeap({0: 1.0}, []).first_few(2) == []
