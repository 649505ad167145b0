# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Row layouts: pure integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.layout import (
    MatrixLayout,
    OutputSlice,
    RowRange,
    holders_of_segments,
    rows_in_buffer,
    tile,
)


@st.composite
def buffers(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int, int]:
    """Matrices of one width laid end to end, cut into shards of whole rows for a few ranks."""
    num_cols = draw(st.integers(1, 9))
    rows = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    world = draw(st.integers(1, 8))
    starts = [sum(rows[:index]) * num_cols for index in range(len(rows))]
    shard_size = -(-sum(rows) // world) * num_cols
    return list(zip(starts, rows, strict=True)), num_cols, shard_size, world


@given(buffers())
def test_shards_cover_every_row_once(case):
    """Every row of every matrix lies on exactly one rank, wherever the buffer is cut."""
    matrices, num_cols, shard_size, world = case
    ranks = [(rank,) for rank in range(world)]
    held = [0] * world
    for start, num_rows in matrices:
        rows = rows_in_buffer(ranks, world * shard_size, start, num_rows, num_cols)
        assert all(a < b for a, b in rows.values())
        assert sorted(row for range_ in rows.values() for row in range(*range_)) == list(
            range(num_rows)
        )
        for rank, (first, last) in rows.items():
            held[rank] += last - first
    assert max(held) * num_cols <= shard_size


def test_last_axis_of_the_mesh_shards_first():
    """Consecutive rows of HFSDP are on the same inner rank of different instances."""
    holders = holders_of_segments((2, 3), [10, 11, 12, 20, 21, 22], (0, 1))
    assert holders == [(10,), (20,), (11,), (21,), (12,), (22,)]
    found = rows_in_buffer(holders, 24, 4, 8, 2)
    assert found == {20: (0, 2), 11: (2, 4), 21: (4, 6), 12: (6, 8)}


def test_ranks_that_differ_in_other_axes_are_replicas():
    """Ranks that differ in axes that do not shard are replicas."""
    assert holders_of_segments((2, 2), [0, 1, 2, 3], (1,)) == [(0, 2), (1, 3)]
    everyone = holders_of_segments((2, 2), [0, 1, 2, 3], ())
    assert everyone == [(0, 1, 2, 3)]
    assert rows_in_buffer(everyone, 12, 0, 3, 4) == dict.fromkeys(range(4), (0, 3))


def test_ranks_outside_of_the_matrix_are_left_out():
    """Ranks that hold nothing of a matrix are left out."""
    ranks = [(rank,) for rank in range(50)]
    assert rows_in_buffer(ranks, 400, 100, 3, 4) == {12: (0, 1), 13: (1, 3)}


def test_shards_inside_a_row_are_refused():
    """A boundary inside a row would cut a matrix that Newton-Schulz needs in whole rows."""
    with pytest.raises(ValueError, match=r"whole rows of 4 elements, got elements \[0, 6\)"):
        rows_in_buffer([(0,), (1,)], 12, 0, 3, 4)


@pytest.mark.parametrize("rows", [((0, 2), (3, 4)), ((0, 2), (1, 4)), ((0, 2), (2, 3))])
def test_boxes_with_gaps_overlaps_or_missing_rows_are_refused(rows):
    """A layout that loses or repeats a row is refused at construction."""
    boxes = {rank: (each, (0, 2)) for rank, each in enumerate(rows)}
    found = tile((4, 2), OutputSlice(RowRange(0, 4)), boxes)
    with pytest.raises(ValueError, match="expected regions with 8 elements in all"):
        MatrixLayout("w", *found, (0, 1))
