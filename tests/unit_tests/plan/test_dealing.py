# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices share a bucket, and in which order buckets come."""

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from hypothesis import given

from megatron_muon.plan.assignment import assign
from megatron_muon.plan.bucket_seconds import seconds_of
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.dealing import BucketDraft, deal
from megatron_muon.plan.layout import MatrixLayout, Region, whole_matrix
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire

_COST, _WIRE = CostModel(), Wire.of("bf16", is_bf16=True)
_LAYOUT = whole_matrix("weight", rows_cut_at(8, 8, [4, 4]), [[(0,), (1,)]])


def _matrix(index: int, owner: int, load_s: float = 1.0, link_s: float = 0.0) -> TravellingMatrix:
    """Return a matrix that takes some seconds."""
    on_link = {owner: link_s}
    return TravellingMatrix(index, _LAYOUT, (owner,), load_s, on_link, on_link, 0.0, 0.0, None, {})


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


@pytest.mark.parametrize("has_replicas", [False, True])
def test_what_few_ranks_hold_is_shared_out_over_buckets(has_replicas):
    """Shards have matrices of one shape each; each rank owns one of each.

    By length, rank 0 would send all of the first bucket, rank 1 all of the second, and replicas
    would pass on all results of a shard at once.
    """
    replicas = {0: (0, 2), 1: (1, 3)} if has_replicas else {0: (0,), 1: (1,)}
    ranks = sorted(rank for each in replicas.values() for rank in each)
    matrices = []
    for index, (owner, shard) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        regions = (Region(replicas[shard], 0, 0, 8, 0, 8, 0),)
        layout = MatrixLayout(f"{index}", ((8, 8),), regions, tuple(ranks))
        matrices.append(TravellingMatrix.of(index, layout, (owner,), _COST, _WIRE))
    dealt = deal(matrices, has_replicas=has_replicas)
    by_length, mixed = (each for each in dealt if len(each) == 2)
    assert sorted(_indices(by_length)) == [[0, 1], [2, 3]]
    assert sorted(_indices(mixed)) == [[0, 3], [1, 2]]
    for draft in mixed:
        assert list(draft.load_s) in ([0, 1], [1, 0])
    if has_replicas:
        one_byte_s = _COST.all_gather_seconds((0, 2), 64)
        found = seconds_of(mixed[0].matrices, _COST, _WIRE)
        # Every rank that holds the same takes as long.
        assert found.spread_s == dict.fromkeys(range(4), one_byte_s * _WIRE.scatter_bytes)


@given(matrix_lists())
def test_every_matrix_is_dealt_out_once(matrices):
    """In every number of buckets and every order."""
    owners = assign(matrices, _COST, _WIRE).owners
    travelling = [
        TravellingMatrix.of(index, *each, _COST, _WIRE)
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
