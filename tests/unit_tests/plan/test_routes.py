# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows of all ranks, and routes: each element to its owner once, and back to every holder."""

import itertools
from collections import Counter

import pytest
from helpers.layouts import elements_of, one_matrix, plan_of, plans
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import Route, routes
from megatron_muon.plan.layout import (
    MatrixLayout,
    OutputSlice,
    holders_of_segments,
    rows_in_buffer,
    tile,
)
from megatron_muon.plan.routes import (
    cut,
    parts_of,
    results_of,
    routes_of,
    section_size,
    source_of,
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
    found = tile((4, 2), OutputSlice(range(4)), boxes)
    with pytest.raises(ValueError, match="expected regions with 8 elements in all"):
        MatrixLayout("w", *found, (0, 1))


@settings(max_examples=50)
@given(plans(max_matrices=4))
def test_every_element_reaches_its_owner_once_and_returns(plan):
    """Routes fill each part exactly once, and restore every shard of every holder."""
    for index, (matrix, owners) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
        # Block, row and column of an element, by rank and place in its shard.
        held = {
            (rank, region.local_row + row, col): (region.block, region.row + row, region.col + col)
            for region in matrix.regions
            for rank in region.holders
            for row, col in itertools.product(range(region.num_rows), range(region.num_cols))
        }
        parts = {
            (block, part.owner): part
            for block, shape in enumerate(matrix.blocks)
            for part in parts_of(index, block, shape, owners)
        }
        all_routes = list(routes_of(index, plan.matrices[index], plan.owners[index]))
        arrived: Counter[tuple[int, int, int]] = Counter()
        returned: Counter[tuple[int, int, int]] = Counter()
        for route in all_routes:
            part = parts[route.block, route.owner]
            assert route.row + route.num_rows <= part.num_rows
            assert route.col + route.num_cols <= part.num_cols
            for row, col in itertools.product(range(route.num_rows), range(route.num_cols)):
                element = (route.block, part.row + route.row + row, part.col + route.col + col)
                local = (route.local_row + row, route.local_col + col)
                assert held[route.source, *local] == element
                arrived[element] += 1
                for holder in route.holders:
                    assert held[holder, *local] == element
                    returned[holder, *local] += 1
        assert arrived == dict.fromkeys(held.values(), 1)
        assert len(arrived) == matrix.num_elements
        assert returned == dict.fromkeys(held, 1)
        for rank in matrix.ranks:
            mine = [route for route in all_routes if rank in route.holders]
            of_matrix = routes_of(index, plan.matrices[index], plan.owners[index], rank)
            assert list(of_matrix) == mine


def test_route_has_fewer_elements_than_32_bits_count(monkeypatch):
    """A larger rectangle is several routes, and so several moves."""
    monkeypatch.setattr(routes, "MOST_ELEMENTS", 4 * 100)
    plan = plan_of([one_matrix([10, 0], 100)], max_owners=1)
    found = [
        (r.row, r.local_row, r.num_rows, r.num_cols)
        for r in routes_of(0, plan.matrices[0], plan.owners[0])
    ]
    assert found == [(0, 0, 4, 100), (4, 4, 4, 100), (8, 8, 2, 100)]


@pytest.mark.parametrize("start", range(12))
def test_a_range_of_a_route_is_up_to_three_rectangles(start):
    """A range of a route is at most three rectangles in the order of its elements."""
    route = Route(0, 0, owner=0, source=1, holders=(1,), row=2, num_rows=3, col=5, num_cols=4,
                  local_row=7, local_col=1)  # fmt: skip
    for stop in range(start + 1, 13):
        pieces = list(cut(route, start, stop))
        assert len(pieces) <= 3
        found = [element for piece in pieces for element in elements_of(piece)]
        assert found == elements_of(route)[start:stop]
        for piece in pieces:
            assert piece.row - route.row == piece.local_row - route.local_row
            assert piece.col - route.col == piece.local_col - route.local_col


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(1, 8), (2, 2), (8, 2), (8, 4), (6, 3)])
def test_evenly_spaced_replicas_serve_equally_many_owners(num_shards, num_replicas):
    """Each replica serves as many owners as there are shards, and itself if it owns the matrix."""
    num_ranks = num_shards * num_replicas
    for shard in range(num_shards):
        holders = tuple(range(shard, num_ranks, num_shards))
        served = Counter(source_of(holders, owner) for owner in range(num_ranks))
        assert served == dict.fromkeys(holders, num_shards)
        assert all(source_of(holders, owner) == owner for owner in holders)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 50)), min_size=1),
)
def test_replicas_have_equal_sections(num_replicas, results):
    """Sections are equal multiples of eight elements, and hold every result once, in order."""
    holders = tuple(range(num_replicas))
    all_routes = [
        Route(i, 0, owner, 0, holders, 0, num_rows, 0, num_cols, 0, 0)
        for i, (owner, num_rows, num_cols) in enumerate(results)
    ]
    total = sum(route.num_elements for route in all_routes)
    size = section_size(num_replicas, total)
    offset, found = 0, []
    for first, piece in results_of(all_routes, size):
        assert first == offset
        offset += piece.num_elements
        assert first // size == (offset - 1) // size
        found += elements_of(piece)
    in_order = sorted(all_routes, key=lambda route: route.owner)
    assert found == [element for route in in_order for element in elements_of(route)]
    if num_replicas > 1:
        assert size % 8 == 0 and size * num_replicas < total + 8 * num_replicas
