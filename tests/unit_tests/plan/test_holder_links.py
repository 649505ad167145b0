# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long holders send."""

from collections import defaultdict
from unittest import mock

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from hypothesis import given

from megatron_muon.plan.assignment import assign
from megatron_muon.plan.bucket_seconds import seconds_of
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.holder_links import HolderLinks
from megatron_muon.plan.layout import whole_matrix
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire

_COST, _WIRE = CostModel(ranks_per_node=2), Wire.of("bf16", is_bf16=True)


@given(matrix_lists(max_matrices=8))
def test_holders_send_what_the_routes_say(matrices):
    """Replicas included; an owner waits for the slowest of its sources."""
    owners = assign(matrices, _COST, _WIRE, max_parts=1).owners
    travelling = [
        TravellingMatrix.of(index, *each, _COST, _WIRE)
        for index, each in enumerate(zip(matrices, owners, strict=True))
    ]
    sent_s: dict[int, float] = defaultdict(float)
    sources: dict[int, set[int]] = defaultdict(set)
    for index, (matrix, of_matrix) in enumerate(zip(matrices, owners, strict=True)):
        for moved in transfers_of(index, matrix, of_matrix, _COST):
            if moved.source != moved.owner:
                one_byte_s = _COST.seconds_per_byte(moved.source, moved.owner)
                sent_s[moved.source] += moved.num_elements * one_byte_s
                sources[moved.owner].add(moved.source)
    links = HolderLinks(travelling, _COST)
    found = {rank: seconds for rank, seconds in links.one_byte_s.items() if seconds}
    assert found == pytest.approx(sent_s)
    of_sources = links.one_byte_s_of_sources
    for owner, ranks in sources.items():
        # Of a matrix of which an owner holds rows, it counts among those that send.
        slowest_s = max(sent_s[rank] for rank in ranks)
        assert slowest_s * (1 - 1e-9) <= of_sources[owner]
        assert of_sources[owner] <= max(slowest_s, sent_s[owner]) * (1 + 1e-9)


@given(matrix_lists(max_matrices=8))
def test_seconds_do_not_depend_on_which_tilings_are_shared(matrices):
    """A rank with other experts may share others; its plan has to be the same to the last bit."""
    owners = assign(matrices, _COST, _WIRE).owners
    travelling = [
        TravellingMatrix.of(index, *each, _COST, _WIRE)
        for index, each in enumerate(zip(matrices, owners, strict=True))
    ]
    shared = seconds_of(travelling, _COST, _WIRE)
    for matrix in matrices:
        matrix.__dict__["elements_by_rank"] = dict(matrix.elements_by_rank)
    assert seconds_of(travelling, _COST, _WIRE) == shared


def test_holders_of_one_tiling_are_gone_through_once():
    """Of thousands of matrices over thousands of ranks."""
    matrices = [whole_matrix(f"{i}", rows_cut_at(8, 8, [4, 4]), [[(0,), (1,)]]) for i in range(100)]
    travelling = [
        TravellingMatrix.of(i, matrix, (i % 2,), _COST, _WIRE) for i, matrix in enumerate(matrices)
    ]
    links, seconds = HolderLinks(travelling, _COST), _COST.seconds_per_byte(0, 1)
    with mock.patch.object(CostModel, "node", autospec=True, side_effect=CostModel.node) as node:
        assert links.one_byte_s[0] == pytest.approx(50 * 32 * seconds)
    assert node.call_count == 4


def test_bucket_takes_the_longer_direction_of_a_link():
    """Rank 0 owns all, rank 1 holds nearly all: it sends as long as rank 0 receives."""
    matrix = whole_matrix("weight", rows_cut_at(8, 8, [1, 7]), [[(0,), (1,)]])
    travelling = [TravellingMatrix.of(0, matrix, (0,), _COST, _WIRE)]
    found = seconds_of(travelling, _COST, _WIRE)
    seconds = 56 * _WIRE.gather_bytes * _COST.seconds_per_byte(0, 1)
    assert found.gather_s == pytest.approx({0: seconds, 1: seconds})
    assert found.scatter_s == pytest.approx({0: seconds, 1: seconds})
    assert found.sources_s == pytest.approx({0: seconds})
    assert found.load_s.keys() == {0}
