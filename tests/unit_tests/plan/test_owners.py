# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Who owns what: properties over random layouts, and small cases by hand."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from unittest import mock

from helpers.layouts import matrix_lists, one_matrix
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.cost import CPU_RANKS, CostModel
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.owners import Assignment, choose_owners, matrix_ns
from megatron_muon.plan.settings import PlanSettings

COSTS = st.builds(
    CostModel,
    tflops=st.sampled_from([1e-6, 1.0, 500.0]),
    gbps=st.sampled_from([0.01, 1.0, 450.0]),
    gbps_between_nodes=st.sampled_from([0.001, 1.0]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
    kernel_us=st.sampled_from([0.0, 5.0]),
    all_reduce_us=st.sampled_from([0.0, 20.0]),
)
LOADS = st.dictionaries(st.integers(0, 30), st.integers(0, 10**9))


def _owners(
    matrices: Sequence[MatrixLayout], cost: CostModel | None = None, **options: object
) -> tuple[tuple[int, ...], ...]:
    return _assignment(matrices, cost or CostModel(), **options).owners


def _assignment(
    matrices: Sequence[MatrixLayout],
    cost: CostModel,
    max_owners: int = 8,
    initial_load_ns: dict[int, int] | None = None,
) -> Assignment:
    settings = PlanSettings(cost, max_owners=max_owners)
    return choose_owners(matrices, settings, initial_load_ns or {})


def _loads(matrices: Sequence[MatrixLayout], found: Assignment, cost: CostModel) -> Counter[int]:
    """Add up Newton-Schulz of what ranks own."""
    load_ns: Counter[int] = Counter()
    for matrix, owners in zip(matrices, found.owners, strict=True):
        for owner in owners:
            load_ns[owner] += matrix_ns(matrix, cost, len(owners))
    return load_ns


@given(matrix_lists(), COSTS, LOADS, st.sampled_from([1, 2, 8]))
def test_owners_are_ranks_of_the_domain_and_loads_are_their_sums(matrices, cost, before, parts):
    """Owners are powers of two of ranks of the domain, and loads are sums."""
    found = _assignment(matrices, cost, parts, before)
    for matrix, owners in zip(matrices, found.owners, strict=True):
        assert len(owners) in (1, 2, 4, 8) and len(owners) <= parts
        first = matrix.ranks.index(owners[0])
        assert owners == matrix.ranks[first : first + len(owners)]
    load_ns = _loads(matrices, found, cost)
    expected = {rank: before.get(rank, 0) + load_ns[rank] for rank in matrices[0].ranks}
    assert found.load_ns == expected


@given(matrix_lists(max_matrices=14), COSTS, LOADS)
def test_no_rank_has_much_more_than_its_share(matrices, cost, before):
    """A rank gets at most the mean and one matrix more, by 4 %, or keeps its load from before."""
    # With latency, whole matrices of one rank may stay.
    cost = dataclasses.replace(cost, all_reduce_us=0, collective_us=0)
    nothing = _assignment(matrices, cost, 1, before)
    loads_before = Counter(nothing.load_ns)
    loads_before.subtract(_loads(matrices, nothing, cost))
    mean_ns = sum(nothing.load_ns.values()) / len(nothing.load_ns)
    longest_ns = max(matrix_ns(matrix, cost) for matrix in matrices)
    most_ns = max(mean_ns + longest_ns, *loads_before.values())
    assert max(nothing.load_ns.values()) <= 1.04 * most_ns + 1


@given(matrix_lists(), COSTS, LOADS)
def test_owners_do_not_depend_on_which_layouts_are_one_object(matrices, cost, before):
    """Owners do not depend on which equal layouts are one object."""
    copies = []
    for matrix in matrices:
        copy = dataclasses.replace(matrix)
        # A rank whose cache was full has a mapping of its own, with other orders of insertion.
        copy.__dict__["elements_by_rank"] = dict(reversed(matrix.elements_by_rank.items()))
        copies.append(copy)
    reversed_loads = dict(reversed(before.items()))
    expected = _assignment(matrices, cost, initial_load_ns=before)
    assert _assignment(copies, cost, initial_load_ns=reversed_loads) == expected


def test_ranks_that_are_busy_elsewhere_get_less():
    """Ranks that are busy with experts get fewer dense matrices."""
    matrices = [one_matrix([33, 31])] * 4
    busy = {0: 4 * matrix_ns(matrices[0], CostModel())}
    assert _owners(matrices, initial_load_ns=busy) == ((1,),) * 4
    assert sorted(_owners(matrices)) == [(0,), (0,), (1,), (1,)]


def test_matrices_stay_on_a_rank_that_holds_them_whole():
    """Matrices stay on a rank that holds them whole unless balance gains."""
    matrices = [one_matrix(rows) for rows in ([64, 0], [0, 64], [60, 4], [4, 60])]
    assert _owners(matrices) == ((0,), (1,), (0,), (1,))


def test_whole_experts_stay_unless_an_exchange_costs_less():
    """Whole experts stay on their ranks unless an exchange costs less than it gains."""
    small, large = (
        [
            one_matrix([side * (rank == number // 4) for rank in range(4)], num_cols=side)
            for number in range(12)
        ]
        for side in (128, 512)
    )
    assert _owners(small, CPU_RANKS) == tuple((number // 4,) for number in range(12))
    assert len(set(_owners(large, CPU_RANKS))) == 4
    # Without latency it pays, and beside a matrix whose rows travel anyway.
    free = dataclasses.replace(CPU_RANKS, all_reduce_us=0, collective_us=0)
    assert len(set(_owners(small, free))) == 4
    assert len(set(_owners([*small, one_matrix([32] * 4, num_cols=128)], CPU_RANKS))) == 4


def test_holders_share_out_what_only_few_ranks_hold():
    """Matrices that few ranks hold are shared out among them, not all given to one."""
    matrices = [one_matrix([33, 31, 0, 0], num_cols=4096)] * 2 + [one_matrix([16] * 4)] * 64
    owners = _owners(matrices, CostModel(kernel_us=100))
    assert sorted(owners[:2]) == [(0,), (1,)]


def test_matrix_longer_than_a_fair_share_is_split_if_that_pays():
    """A matrix longer than a fair share is split, unless all-reduces cost more."""
    large = one_matrix([2048] * 8, num_cols=4096)
    assert _owners([large]) == (tuple(range(8)),)
    assert [len(_owners([large], max_owners=parts)[0]) for parts in (2, 1)] == [2, 1]
    assert len(_owners([one_matrix([8] * 8)])[0]) == 1


def test_split_matrices_are_assigned_first():
    """Split matrices are assigned first, so that their sets of owners are free."""
    large = one_matrix([1024] * 16, num_cols=4096)
    # As long as a part of the large one, and held by one rank of each node for the most part.
    rows = [[0] * rank + [4081 + rank] + [1] * (15 - rank) for rank in (0, 8)]
    small = [one_matrix(of_rank, 4096) for of_rank in rows]
    # Whole ones of several lengths, as if it paid to split the large one alone.
    with mock.patch("megatron_muon.plan.owners._choose_parts", lambda *_: [1, 1, 8]):
        (first,), (second,), owners = _owners([*small, large])
    assert len(owners) == 8 and not {first, second} & set(owners)
