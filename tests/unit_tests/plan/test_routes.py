# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Routes: every element of a matrix goes to its owner once, and comes back to every holder."""

from collections import Counter

import numpy as np
import pytest
from helpers.layouts import plans
from hypothesis import given, settings

from megatron_muon.plan import ExchangePlan, Route
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.routes import cut, nearest_holder, parts_of


def _shards(plan: ExchangePlan, index: int) -> dict[int, np.ndarray]:
    """Return for every rank its shard of a matrix of distinct numbers."""
    matrix = plan.matrices[index]
    first, blocks = 0, []
    for rows, cols in matrix.blocks:
        blocks.append(first + np.arange(rows * cols).reshape(rows, cols))
        first += rows * cols
    shapes: dict[int, tuple[int, int]] = {}
    for f in matrix.regions:
        for rank in f.holders:
            rows, _ = shapes.get(rank, (0, 0))
            shapes[rank] = (max(rows, f.local_row + f.num_rows), f.num_cols)
    shards = {rank: np.full(shape, -1) for rank, shape in shapes.items()}
    for f in matrix.regions:
        for rank in f.holders:
            shards[rank][f.local_row : f.local_row + f.num_rows] = blocks[f.block][
                f.row : f.row + f.num_rows, f.col : f.col + f.num_cols
            ]
    return shards


def _local(shard: np.ndarray, route: Route) -> np.ndarray:
    return shard[
        route.local_row : route.local_row + route.num_rows,
        route.local_col : route.local_col + route.num_cols,
    ]


@settings(max_examples=50)
@given(plans(max_matrices=4))
def test_every_element_reaches_its_owner_once_and_returns(plan):
    """Routes fill each part exactly once, and restore every shard of every holder."""
    for index, (matrix, owners) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
        shards = _shards(plan, index)
        assert all((shard >= 0).all() for shard in shards.values())
        parts = {
            (block, part.owner): np.full((part.num_rows, part.num_cols), -1)
            for block, shape in enumerate(matrix.blocks)
            for part in parts_of(index, block, shape, owners)
        }
        back = {rank: np.full(shard.shape, -1) for rank, shard in shards.items()}
        routes = list(plan.routes(index))
        for route in routes:
            target = _in_part(parts[route.block, route.owner], route)
            assert (target == -1).all()
            target[:] = _local(shards[route.source], route)
        orthogonalized = Counter()
        for part in parts.values():
            orthogonalized.update(part.ravel().tolist())
        assert orthogonalized == dict.fromkeys(range(matrix.num_elements), 1)
        for route in routes:
            for holder in route.holders:
                target = _local(back[holder], route)
                assert (target == -1).all()
                target[:] = _in_part(parts[route.block, route.owner], route)
        for rank, shard in shards.items():
            assert (back[rank] == shard).all()
            mine = [route for route in routes if rank in route.holders]
            assert list(plan.routes(index, rank)) == mine


def _in_part(part: np.ndarray, route: Route) -> np.ndarray:
    return part[route.row : route.row + route.num_rows, route.col : route.col + route.num_cols]


def _elements(route: Route) -> list[tuple[int, int]]:
    return [
        (route.local_row + row, route.local_col + col)
        for row in range(route.num_rows)
        for col in range(route.num_cols)
    ]


@pytest.mark.parametrize("start", range(12))
def test_a_range_of_a_route_is_up_to_three_rectangles(start):
    """The end of a row, whole rows, the beginning of a row; in the order of the elements."""
    route = Route(0, 0, owner=0, source=1, holders=(1,), row=2, num_rows=3, col=5, num_cols=4,
                  local_row=7, local_col=1)  # fmt: skip
    for stop in range(start + 1, 13):
        pieces = list(cut(route, start, stop))
        assert len(pieces) <= 3
        found = [element for piece in pieces for element in _elements(piece)]
        assert found == _elements(route)[start:stop]
        for piece in pieces:
            assert piece.row - route.row == piece.local_row - route.local_row
            assert piece.col - route.col == piece.local_col - route.local_col


@pytest.mark.parametrize("ranks_per_node", [1, 4, 8])
@pytest.mark.parametrize(("num_shards", "num_replicas"), [(1, 8), (2, 2), (8, 2), (8, 4), (6, 3)])
def test_evenly_spaced_replicas_serve_equally_many_owners(num_shards, num_replicas, ranks_per_node):
    """Each sends rows to, and gets results of, as many of them as there are shards."""
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
