# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What matrices of a bucket take on each rank, compared with their routes."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from helpers.planned import assign
from hypothesis import given
from megatron_muon.plan.bucket_seconds import seconds_of
from megatron_muon.plan.travelling_matrix import TravellingMatrix

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, whole_matrix
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.wire import Wire

_COST, _WIRE = CostModel(ranks_per_node=2), Wire.of("bf16", is_bf16=True)


def _travelling(
    matrices: Sequence[MatrixLayout], owners: Sequence[tuple[int, ...]]
) -> list[TravellingMatrix]:
    return [
        TravellingMatrix.of(index, *each, _COST, _WIRE)
        for index, each in enumerate(zip(matrices, owners, strict=True))
    ]


@given(matrix_lists(max_matrices=8))
def test_links_carry_what_the_routes_say(matrices):
    """The busier direction of each link, replicas included; an owner waits for its sources."""
    owners = assign(matrices, _COST, _WIRE, max_parts=1).owners
    sent_s: dict[int, float] = defaultdict(float)
    received_s: dict[int, float] = defaultdict(float)
    sources: dict[int, set[int]] = defaultdict(set)
    for index, (matrix, of_matrix) in enumerate(zip(matrices, owners, strict=True)):
        for moved in transfers_of(index, matrix, of_matrix, _COST):
            if moved.source != moved.owner:
                seconds = 2 * moved.num_elements
                seconds *= _COST.seconds_per_byte(moved.source, moved.owner)
                sent_s[moved.source] += seconds
                received_s[moved.owner] += seconds
                sources[moved.owner].add(moved.source)
    found = seconds_of(_travelling(matrices, owners), _COST, _WIRE)
    links_s = {
        rank: max(sent_s[rank], received_s[rank]) for rank in (*sent_s.keys(), *received_s.keys())
    }
    for of_links in (found.gather_s, found.scatter_s):
        assert {rank: s for rank, s in of_links.items() if s} == pytest.approx(links_s)
    for owner, ranks in sources.items():
        slowest_s = max(sent_s[rank] for rank in ranks)
        # An owner that holds rows of its matrices counts among those that send them.
        most_s = max(slowest_s, sent_s[owner])
        assert slowest_s * (1 - 1e-9) <= found.sources_s[owner] <= most_s * (1 + 1e-9)


@given(matrix_lists(max_matrices=8))
def test_seconds_do_not_depend_on_which_tilings_are_shared(matrices):
    """A rank with other experts may share others; its plan has to be the same to the last bit."""
    travelling = _travelling(matrices, assign(matrices, _COST, _WIRE).owners)
    shared = seconds_of(travelling, _COST, _WIRE)
    for matrix in matrices:
        matrix.__dict__["elements_by_rank"] = dict(matrix.elements_by_rank)
    assert seconds_of(travelling, _COST, _WIRE) == shared


def test_rank_that_owns_nothing_sends_as_long_as_others_receive():
    """Rank 0 owns all, rank 1 holds nearly all."""
    matrix = whole_matrix("weight", rows_cut_at(8, 8, [1, 7]), [[(0,), (1,)]])
    found = seconds_of(_travelling([matrix], [(0,)]), _COST, _WIRE)
    seconds = 56 * _WIRE.gather_bytes * _COST.seconds_per_byte(0, 1)
    assert found.gather_s == pytest.approx({0: seconds, 1: seconds})
    assert found.scatter_s == pytest.approx({0: seconds, 1: seconds})
    assert found.sources_s == pytest.approx({0: seconds})
    assert found.load_s.keys() == {0}
