# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Who owns what: properties over random layouts, and the figures of known models."""

import dataclasses
from typing import get_args

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from helpers.planned import assign
from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.assignment import Objective, matrix_seconds
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import Machine, Parallelism, simulate
from megatron_muon.plan.report import build_report

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, whole_matrix
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.splits import Splits
from megatron_muon.plan.wire import Wire

BF16 = Wire("bfloat16", "bfloat16")
COSTS = st.builds(
    CostModel,
    tflops=st.sampled_from([1e-6, 1.0, 500.0]),
    gbps=st.sampled_from([0.01, 1.0, 450.0]),
    gbps_between_nodes=st.sampled_from([0.001, 1.0]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
    kernel_us=st.sampled_from([0.0, 5.0]),
    all_reduce_us=st.sampled_from([0.0, 20.0]),
)


def _round_robin(matrices: list[MatrixLayout], cost: CostModel) -> float:
    load = dict.fromkeys((rank for matrix in matrices for rank in matrix.ranks), 0.0)
    for index, matrix in enumerate(matrices):
        load[matrix.ranks[index % len(matrix.ranks)]] += matrix_seconds(matrix, cost)
    return max(load.values())


@given(matrix_lists(), COSTS, st.sampled_from(get_args(Objective)), st.sampled_from([1, 2, 8]))
def test_assignment_is_complete_deterministic_and_of_the_domain(matrices, cost, objective, parts):
    """Every matrix has distinct owners of its domain, a power of two of them, always the same."""
    found = assign(matrices, cost, BF16, objective=objective, max_parts=parts)
    again = assign(list(matrices), cost, BF16, objective=objective, max_parts=parts)
    assert found == again
    load = dict.fromkeys(found.load_s, 0.0)
    for matrix, owners in zip(matrices, found.owners, strict=True):
        assert len(owners) in (1, 2, 4, 8) and len(owners) <= parts
        assert len(set(owners)) == len(owners) and set(owners) <= set(matrix.ranks)
        for owner in owners:
            load[owner] += matrix_seconds(matrix, cost, len(owners))
    assert found.load_s == pytest.approx(load)


@given(matrix_lists(max_matrices=14), COSTS)
def test_balance_is_never_worse_than_round_robin(matrices, cost):
    """The rank with the most work has at most what it has where ranks take turns."""
    found = assign(matrices, cost, BF16, objective="balance", max_parts=1)
    assert max(found.load_s.values()) <= _round_robin(matrices, cost) * (1 + 1e-9)


def _one_matrix(rows: list[int], cols: int = 64) -> MatrixLayout:
    ranks = [[(rank,) for rank in range(len(rows))]]
    return whole_matrix("weight", rows_cut_at(sum(rows), cols, rows), ranks)


def test_ranks_that_are_busy_elsewhere_get_less():
    """Four equal matrices on two ranks, one of which has as much to do with experts."""
    matrices = [_one_matrix([33, 31])] * 4
    busy = {0: 4 * matrix_seconds(matrices[0], CostModel()), 1: 0.0}
    assert assign(matrices, CostModel(), BF16, initial_load_s=busy).owners == ((1,),) * 4
    assert sorted(assign(matrices, CostModel(), BF16).owners) == [(0,), (0,), (1,), (1,)]


def test_local_matrices_stay_and_boundary_matrices_go_to_their_largest_holder():
    """Where balance has nothing to gain, nothing moves that need not."""
    matrices = [_one_matrix([64, 0]), _one_matrix([0, 64]), _one_matrix([60, 4])]
    matrices.append(_one_matrix([4, 60]))
    found = assign(matrices, CostModel(), BF16)
    assert found.owners == ((0,), (1,), (0,), (1,))


def test_owners_are_node_local_when_links_between_nodes_are_slow():
    """Rank 9 holds most rows, but the node of rank 0 does; the link decides."""
    rows = [0] * 16
    rows[0], rows[1], rows[2], rows[9] = 30, 20, 20, 40
    cost = CostModel(gbps=450, gbps_between_nodes=1)
    assert assign([_one_matrix(rows)], cost, BF16).owners == ((0,),)
    cost = CostModel(gbps=450, gbps_between_nodes=450)
    assert assign([_one_matrix(rows)], cost, BF16).owners == ((9,),)


def test_matrix_longer_than_a_fair_share_is_cut_where_that_pays():
    """One large matrix on eight ranks is cut; a tiny one, whose all-reduces cost more, is not."""
    large = _one_matrix([2048] * 8, cols=4096)
    assert assign([large], CostModel(), BF16).owners == (tuple(range(8)),)
    assert len(assign([large], CostModel(), BF16, max_parts=2).owners[0]) == 2
    assert len(assign([large], CostModel(), BF16, max_parts=1).owners[0]) == 1
    tiny = _one_matrix([8] * 8, cols=64)
    assert len(assign([tiny], CostModel(), BF16).owners[0]) == 1


def test_matrix_with_copies_is_never_cut():
    """A copy that is cut and one that is not would round differently, and drift apart."""
    large = _one_matrix([2048] * 8, cols=4096)
    copy = dataclasses.replace(large, has_copies=True)
    assert len(assign([copy], CostModel(), BF16).owners[0]) == 1
    assert [len(owners) for owners in assign([copy, large], CostModel(), BF16).owners] == [1, 4]


def test_unknown_objective_is_refused():
    """The message lists what there is."""
    with pytest.raises(ValueError, match=r"expected one of \('joint', 'balance'\), got 'speed'"):
        assign([], CostModel(), BF16, objective="speed")


def test_llama_over_64_ranks_is_balanced_by_holders():
    """The largest holders would load four ranks with 32 times the mean; joint keeps 1.10."""
    simulation = simulate(PRESETS["llama3-8b"], Parallelism(dp=64), Machine(), ExchangeSettings())
    report = build_report(range(64), simulation.plans)
    assert report.busiest_over_ideal <= 1.10
    assert report.moved_elements <= 0.975 * report.num_elements


@pytest.mark.parametrize(("max_parts", "ratio"), [(1, 8.0), (8, 2.0)])
def test_llama_over_512_ranks_needs_cut_matrices(max_parts, ratio):
    """128 matrices cannot keep 512 ranks busy unless they are cut."""
    settings = ExchangeSettings(max_parts=max_parts)
    simulation = simulate(
        PRESETS["llama3-8b"], Parallelism(dp=512), Machine(), settings, splits=Splits(qkv=False)
    )
    report = build_report(range(512), simulation.plans)
    assert report.busiest_over_ideal <= ratio
    assert report.busiest_over_ideal > ratio - 0.5
