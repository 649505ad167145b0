# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Row layouts: pure integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.layout import RowLayout, shards_from_flat_ranges


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
    ranges = [(rank * shard_size, (rank + 1) * shard_size) for rank in range(world)]
    held = [0] * world
    for start, num_rows in matrices:
        layout = shards_from_flat_ranges(num_rows, num_cols, start, ranges)
        owners = [
            [rank for rank, (a, b) in enumerate(layout.shards) if a <= row < b]
            for row in range(num_rows)
        ]
        assert all(len(found) == 1 for found in owners)
        for rank in range(world):
            held[rank] += layout.shard_rows(rank)
    assert max(held) * num_cols <= shard_size


def test_shards_follow_the_order_of_ranks_when_it_is_not_ascending():
    """HFSDP's groups count outer ranks first, so consecutive ranks hold distant rows."""
    layout = shards_from_flat_ranges(8, 2, 4, [(0, 8), (12, 16), (8, 12), (16, 24)])
    assert layout.shards == ((0, 2), (4, 6), (2, 4), (6, 8))
    assert layout.max_shard_rows == 2


def test_shards_are_empty_outside_of_the_matrix():
    """Ranks whose part of the buffer misses the matrix hold no rows of it."""
    layout = shards_from_flat_ranges(3, 4, 100, [(0, 100), (100, 104), (104, 112), (112, 200)])
    assert [layout.shard_rows(rank) for rank in range(4)] == [0, 1, 2, 0]


def test_shards_inside_a_row_are_refused():
    """A boundary inside a row would cut a matrix that Newton-Schulz needs in whole rows."""
    with pytest.raises(ValueError, match=r"whole rows of 4 elements, got elements \[0, 6\)"):
        shards_from_flat_ranges(3, 4, 0, [(0, 6), (6, 12)])


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (((0, 2), (3, 4)), r"a shard \[3, 4\) after row 2"),
        (((0, 2), (1, 4)), r"a shard \[1, 4\) after row 2"),
        (((0, 2), (2, 3)), "got 3 rows"),
    ],
)
def test_row_layout_refuses_gaps_overlaps_and_missing_rows(shards, message):
    """A layout that loses or repeats a row is an error at construction."""
    with pytest.raises(ValueError, match=message):
        RowLayout(4, 2, shards)
