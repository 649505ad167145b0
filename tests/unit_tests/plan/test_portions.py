# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Lines of a matrix are dealt out to portions: each once, in order, evenly over the shards."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.portions import borders, deal_out, lines_at_a_time


def _lines(cuts: list[int], num_portions: int, longest: int) -> list[list[int]]:
    """Return the lines of each portion, in the order of the stack."""
    length = cuts[-1]
    at_a_time = lines_at_a_time(longest, num_portions)
    stack = [-1] * length
    for start, stop in zip(cuts, cuts[1:], strict=False):
        line = start
        for dealt in deal_out(start, stop, length, num_portions, at_a_time):
            assert dealt.start == line and dealt.number > 0
            assert stack[dealt.place : dealt.place + dealt.number] == [-1] * dealt.number
            lines = range(line, line + dealt.number)
            stack[dealt.place : dealt.place + dealt.number] = lines
            line += dealt.number
            starts = borders(length, num_portions)
            first, last = starts[dealt.portion], starts[dealt.portion + 1]
            assert first <= dealt.place and dealt.place + dealt.number <= last
        assert line == stop
    starts = borders(length, num_portions)
    return [stack[a:b] for a, b in zip(starts, starts[1:], strict=False)]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 300),
)
def test_every_line_has_one_place_and_portions_ascend(lengths, num_portions, longest):
    """Wherever the matrix is cut into shards."""
    cuts = [0]
    for length in lengths:
        cuts.append(cuts[-1] + length)
    portions = _lines(cuts, num_portions, longest)
    assert sorted(line for lines in portions for line in lines) == list(range(cuts[-1]))
    for lines in portions:
        assert lines == sorted(lines)


def test_portions_are_equal_and_so_are_the_shares_of_each_shard():
    """7 shards of 64 rows in 4 portions: 16 rows of each shard in each portion."""
    portions = _lines(list(range(0, 449, 64)), 4, 64)
    assert [len(lines) for lines in portions] == [112] * 4
    for number, lines in enumerate(portions):
        for shard in range(7):
            first = 64 * shard + 16 * number
            assert set(range(first, first + 16)) <= set(lines)
