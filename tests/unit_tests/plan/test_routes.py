# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Routes: every element of a matrix goes to its owner once, and comes back to every holder."""

import itertools
from collections import Counter

import pytest
from helpers.layouts import elements_of, plans
from hypothesis import given, settings

from megatron_muon.plan import Route
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.routes import cut, nearest_holder, parts_of


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
        routes = list(plan.routes(index))
        arrived: Counter[tuple[int, int, int]] = Counter()
        returned: Counter[tuple[int, int, int]] = Counter()
        for route in routes:
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
            mine = [route for route in routes if rank in route.holders]
            assert list(plan.routes(index, rank)) == mine


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


@pytest.mark.parametrize("ranks_per_node", [1, 4, 8])
@pytest.mark.parametrize(("num_shards", "num_replicas"), [(1, 8), (2, 2), (8, 2), (8, 4), (6, 3)])
def test_evenly_spaced_replicas_serve_equally_many_owners(num_shards, num_replicas, ranks_per_node):
    """Each replica serves as many owners as there are shards."""
    cost = CostModel(ranks_per_node=ranks_per_node)
    num_ranks = num_shards * num_replicas
    for shard in range(num_shards):
        holders = tuple(range(shard, num_ranks, num_shards))
        served = Counter(nearest_holder(holders, owner, cost) for owner in range(num_ranks))
        assert set(served) == set(holders)
        assert num_shards % ranks_per_node or set(served.values()) == {num_shards}
        for owner in range(num_ranks):
            near = [rank for rank in holders if cost.node(rank) == cost.node(owner)]
            assert nearest_holder(holders, owner, cost) in (near or holders)
