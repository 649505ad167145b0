# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Lines are dealt out to portions once, in order, evenly over the shards; where that pays."""

import dataclasses

import pytest
from helpers.layouts import rows_cut_at
from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.assignment import Assignment
from megatron_muon.plan.portions import borders, deal_out, lines_at_a_time
from megatron_muon.plan.travelling_matrix import TravellingMatrix

from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, whole_matrix
from megatron_muon.plan.wire import Wire

_WIRE = Wire.of("bf16", is_bf16=True)


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
