# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices share a bucket, and in which order buckets come."""

from collections.abc import Mapping

from helpers.layouts import matrix_lists, rows_cut_at
from hypothesis import given

from megatron_muon.plan.assignment import assign
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.dealing import BucketDraft, deal
from megatron_muon.plan.layout import whole_matrix
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire

_LAYOUT = whole_matrix("weight", rows_cut_at(8, 8, [4, 4]), [[(0,), (1,)]])


def _matrix(
    index: int,
    owner: int,
    load_s: float = 1.0,
    link_s: float = 0.0,
    spread_s: Mapping[tuple[int, ...], float] | None = None,
) -> TravellingMatrix:
    """Return a matrix that takes some seconds."""
    on_link = {owner: link_s}
    return TravellingMatrix(
        index, _LAYOUT, (owner,), load_s, on_link, on_link, 0.0, 0.0, None, spread_s or {}
    )


def _indices(drafts: list[BucketDraft]) -> list[list[int]]:
    return [[matrix.index for matrix in draft.matrices] for draft in drafts]


def test_buckets_with_least_traffic_are_first_and_last():
    """Not those with the shortest matrices, of which a rank may have many."""
    matrices = [
        _matrix(0, owner=0, load_s=4.0, link_s=5.0),
        _matrix(1, owner=0, load_s=3.0, link_s=1.0),
        _matrix(2, owner=0, load_s=2.0, link_s=3.0),
        _matrix(3, owner=0, load_s=1.0, link_s=2.0),
    ]
    of_four = next(each for each in deal(matrices, has_replicas=False) if len(each) == 4)
    assert _indices(of_four) == [[3], [0], [2], [1]]


def test_of_buckets_with_equal_traffic_the_shortest_is_last():
    """What is long then has the others to travel beside."""
    matrices = [_matrix(i, owner=0, load_s=3.0 - i) for i in range(3)]
    of_three = next(each for each in deal(matrices, has_replicas=False) if len(each) == 3)
    assert _indices(of_three) == [[1], [0], [2]]


def test_replicas_pass_on_as_much_in_each_bucket():
    """Shards have matrices of one shape each, and each owner has one of each."""
    first, second = {(0, 2): 1.0}, {(1, 3): 1.0}
    matrices = [
        _matrix(0, owner=0, spread_s=first),
        _matrix(1, owner=1, spread_s=first),
        _matrix(2, owner=0, spread_s=second),
        _matrix(3, owner=1, spread_s=second),
    ]
    by_length, even = (each for each in deal(matrices, has_replicas=True) if len(each) == 2)
    assert [draft.spread_s for draft in by_length] == [{0: 2.0}, {1: 2.0}]
    assert [draft.spread_s for draft in even] == [{0: 1.0, 1: 1.0}] * 2
    assert [draft.load_s for draft in even] == [{0: 1.0, 1: 1.0}] * 2
    # Every rank that holds the same takes as long.
    assert even[0].seconds().spread_s == dict.fromkeys(range(4), 1.0)


@given(matrix_lists())
def test_every_matrix_is_dealt_out_once(matrices):
    """In every number of buckets and every order."""
    cost, wire = CostModel(), Wire.of("bf16", is_bf16=True)
    owners = assign(matrices, cost, wire).owners
    travelling = [
        TravellingMatrix.of(index, *each, cost, wire)
        for index, each in enumerate(zip(matrices, owners, strict=True))
    ]
    has_replicas = any(matrix.sent is not None for matrix in travelling)
    counts = []
    for drafts in deal(travelling, has_replicas=has_replicas):
        counts.append(len(drafts))
        assert all(draft.matrices for draft in drafts)
        found = sorted(index for indices in _indices(drafts) for index in indices)
        assert found == list(range(len(matrices)))
    assert counts[0] == 1 and counts == sorted(counts)
