# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices share a bucket, and in which order buckets come."""

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from helpers.planned import assign
from hypothesis import given
from megatron_muon.plan.bucket_seconds import seconds_of
from megatron_muon.plan.dealing import BucketDraft, deal
from megatron_muon.plan.travelling_matrix import TravellingMatrix

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, Region, whole_matrix
from megatron_muon.plan.wire import Wire

_COST, _WIRE = CostModel(), Wire.of("bf16", is_bf16=True)
_LAYOUT = whole_matrix("weight", rows_cut_at(8, 8, [4, 4]), [[(0,), (1,)]])


def _matrix(index: int, owner: int, load_s: float) -> TravellingMatrix:
    """Return a matrix that takes some seconds."""
    on_link = {owner: 0.0}
    return TravellingMatrix(index, _LAYOUT, (owner,), load_s, on_link, on_link, 0.0, 0.0, None, {})


def _indices(drafts: list[BucketDraft]) -> list[list[int]]:
    return [[matrix.index for matrix in draft.matrices] for draft in drafts]


def test_longest_matrices_are_outside_or_last():
    """By length the two with the longest are first and last; mixed, the shortest come first."""
    matrices = [_matrix(i, owner=0, load_s=4.0 - i) for i in range(4)]
    by_length, mixed, *_ = (each for each in deal(matrices) if len(each) == 4)
    assert _indices(by_length) == [[0], [2], [3], [1]]
    assert _indices(mixed) == [[3], [2], [1], [0]]


def test_ranks_that_can_wait_have_their_longest_matrix_in_an_inner_bucket():
    """Two ranks have two long matrices and no time to wait, others have one and much of it.

    The first bucket then gathers rows for the two alone, and the last one scatters their results.
    """
    matrices = [
        *(_matrix(index, owner=index // 2, load_s=4.0) for index in range(4)),
        *(_matrix(4 + index, owner=2 + index, load_s=4.0) for index in range(3)),
        # They hide traffic in the buckets that have no long one.
        *(_matrix(7 + index, owner=2 + index % 3, load_s=1.0) for index in range(6)),
    ]
    of_three = [each for each in deal(matrices) if len(each) == 3]
    assert len(of_three) == 3
    first, inner, last = _indices(of_three[-1])
    assert (first, inner, last) == ([0, 2, 7, 8, 9], [4, 5, 6], [1, 3, 10, 11, 12])
    # By length the first bucket is for all.
    assert {4, 5, 6} <= set(_indices(of_three[0])[0])


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
    by_length, mixed = (each for each in deal(matrices) if len(each) == 2)
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
    counts = []
    for drafts in deal(travelling):
        counts.append(len(drafts))
        assert all(draft.matrices for draft in drafts)
        found = sorted(index for indices in _indices(drafts) for index in indices)
        assert found == list(range(len(matrices)))
    assert counts[0] == 1 and counts == sorted(counts)
