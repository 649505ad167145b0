# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The plan of all ranks: owners, buckets, and entries that they compare."""

import copy
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from unittest import mock

import pytest
from helpers.layouts import (
    SLOW,
    matrix_lists,
    one_matrix,
    plan_of,
    rows_cut_at,
    whole_matrix,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import layout_entries, staging_problem
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.owners import _RankLoads, choose_owners, matrix_ns
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.plan.staging import StagingLayout


@settings(max_examples=30)
@given(matrix_lists(), st.sampled_from([1, 5000, 2**31]), st.sampled_from([1, 8]))
def test_plan_is_the_same_whatever_ranks_share_of_their_layouts(matrices, limit, max_owners):
    """A plan does not depend on whether layers share one layout object."""
    plan = plan_of(matrices, staging_bytes=limit, max_owners=max_owners)
    for matrix in matrices:
        assert matrix.elements_by_rank
    apart = [copy.deepcopy(matrix) for matrix in matrices]
    again = plan_of(apart, staging_bytes=limit, max_owners=max_owners)
    assert again.entries() == plan.entries() and again == plan


def _plan_of_rows(rows: list[int], names: str = "a") -> ExchangePlan:
    return plan_of(
        [one_matrix(rows, 4, name=f"{name}.weight") for name in names], staging_bytes=9000
    )


def test_plans_that_differ_have_different_entries():
    """A layout, an owner or a bucket that differs shows in the line of its matrix."""
    plan, other = _plan_of_rows([5, 3]), _plan_of_rows([6, 2])
    (layout,), (entry,) = layout_entries(plan.matrices), plan.entries()
    assert layout.startswith("a.weight ((8, 4),) layout ")
    assert layout == layout_entries(_plan_of_rows([5, 3]).matrices)[0]
    assert layout != layout_entries(other.matrices)[0]
    assert entry.startswith("a.weight owners (") and entry.endswith(" bucket 0")
    assert dataclasses.replace(plan, buckets=()).entries()[0].endswith(" bucket local")


@settings(max_examples=15)
@given(matrix_lists(), matrix_lists())
def test_refusal_names_a_limit_that_works(first, second):
    """The limit named for two plans, which share it equally, works."""

    def planned(limit: int) -> tuple[list[ExchangePlan], int]:
        """Plan one after the other, as ranks do."""
        plans = [plan_of(matrices, staging_bytes=limit // 2) for matrices in (first, second)]
        return plans, sum(plan.staging_bytes for plan in plans)

    plans, needed = planned(1)
    problem = staging_problem(plans, needed, 1)
    assert f"expected at most 1 bytes a rank, got {needed:,} for" in problem
    enough = int(re.search(r"Set exchange.staging_bytes to (\d+) or more", problem)[1])
    plans, needed = planned(enough)
    assert needed <= enough and staging_problem(plans, needed, enough) is None
    assert staging_problem(plans, needed, None) is None


COSTS = st.builds(
    CostModel,
    tflops=st.sampled_from([1e-6, 1.0, 500.0]),
    gbps=st.sampled_from([0.01, 1.0, 450.0]),
    gbps_between_nodes=st.sampled_from([0.001, 1.0]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
    kernel_us=st.sampled_from([0.0, 5.0]),
    all_reduce_us=st.sampled_from([0.0, 20.0]),
)


# Rows by rank of six experts that are sharded as a batch.
_EXPERTS = [[2048 * (rank == expert // 2) for rank in range(4)] for expert in range(6)]


def _owners(
    matrices: Sequence[MatrixLayout], cost: CostModel | None = None, max_owners: int = 8
) -> tuple[tuple[int, ...], ...]:
    return choose_owners(matrices, PlanSettings(cost or CostModel(), max_owners=max_owners))


@given(matrix_lists(), COSTS, st.sampled_from([1, 2, 8]))
def test_owners_are_powers_of_two_of_ranks_of_the_domain(matrices, cost, parts):
    """Owners are consecutive ranks of the domain, a power of two of them."""
    for matrix, owners in zip(matrices, _owners(matrices, cost, parts), strict=True):
        assert len(owners) in (1, 2, 4, 8) and len(owners) <= parts
        first = matrix.ranks.index(owners[0])
        assert owners == matrix.ranks[first : first + len(owners)]


@given(matrix_lists(max_matrices=14), COSTS)
def test_no_rank_has_much_more_than_its_share(matrices, cost):
    """A rank gets at most the mean and one matrix more, by 4 %, unless no rank sends any rows."""
    times_ns = [matrix_ns(matrix, cost) for matrix in matrices]
    load_ns: Counter[int] = Counter()
    for (owner,), time_ns in zip(_owners(matrices, cost, 1), times_ns, strict=True):
        load_ns[owner] += time_ns
    mean_ns = sum(times_ns) / len(matrices[0].ranks)
    limit_ns = 1.04 * (mean_ns + max(times_ns)) + 1
    if all(len(matrix.elements_by_rank) == 1 for matrix in matrices):
        limit_ns = max(limit_ns, mean_ns + 1 + 3 * cost.collective_ns(matrices[0].ranks))
    assert max(load_ns.values()) <= limit_ns


@given(matrix_lists(), COSTS)
def test_owners_do_not_depend_on_which_layouts_are_one_object(matrices, cost):
    """Owners do not depend on which equal layouts are one object."""
    copies = []
    for matrix in matrices:
        copy = dataclasses.replace(matrix)
        # A rank whose cache was full has a mapping of its own, with other orders of insertion.
        copy.__dict__["elements_by_rank"] = dict(reversed(matrix.elements_by_rank.items()))
        copies.append(copy)
    assert _owners(copies, cost) == _owners(matrices, cost)


def test_matrices_stay_on_a_rank_that_holds_them_whole():
    """Matrices stay on a rank that holds them whole unless balance gains."""
    matrices = [one_matrix(rows) for rows in ([64, 0], [0, 64], [60, 4], [4, 60])]
    assert _owners(matrices) == ((0,), (1,), (0,), (1,))


def test_matrices_of_one_rank_move_only_where_that_saves_more_than_an_exchange_costs():
    """Six experts of four ranks, two on each of three, stay unless they are large."""
    small, large = ([one_matrix(rows, cols) for rows in _EXPERTS] for cols in (256, 16384))
    held = tuple((rank,) for rank in (0, 0, 1, 1, 2, 2))
    assert _owners(small) == held
    assert not plan_of(small, CostModel()).buckets
    assert _owners(large) != held
    free = CostModel(all_reduce_us=0, collective_us=0)
    assert _owners(small, free) != held
    # A matrix that must be exchanged makes the collectives anyway.
    assert _owners([*small, one_matrix([64] * 4)])[:6] != held


def test_holders_share_out_what_only_few_ranks_hold():
    """Matrices that few ranks hold are shared out among them, not all given to one."""
    matrices = [one_matrix([33, 31, 0, 0], num_cols=4096)] * 2 + [one_matrix([16] * 4)] * 64
    owners = _owners(matrices, CostModel(kernel_us=100))
    assert sorted(owners[:2]) == [(0,), (1,)]


def test_matrix_longer_than_a_fair_share_is_split_if_that_pays():
    """A matrix longer than a fair share is split, unless all-reduces cost more."""
    large = one_matrix([2048] * 8, num_cols=4096)
    assert _owners([large]) == ((0, 1, 2, 3),)
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


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 9)), max_size=40))
def test_matrices_without_a_holder_that_fits_go_to_the_least_loaded_ranks(parts):
    """One, two or four consecutive ranks own a matrix, whose longest load was the least."""
    loads, load_ns = _RankLoads(range(8), capacity_ns=0), Counter()
    matrix = one_matrix([8] * 8)
    for num_parts, part_ns in parts:
        sets = list(itertools.batched(matrix.ranks, num_parts))
        expected = min(sets, key=lambda ranks: (max(load_ns[rank] for rank in ranks), ranks))
        assert loads.assign(matrix, num_parts, part_ns) == expected
        load_ns.update(dict.fromkeys(expected, part_ns))


UNSTACKED = CostModel(stack_tiles=1)
# Collectives that cost nothing: buckets may be as short as their longest matrix.
FREE = CostModel(stack_tiles=1, all_reduce_us=0, collective_us=0)


def _matrices(number: int, rows: int = 32) -> list:
    return [one_matrix([rows, rows], name=f"{index}.weight") for index in range(number)]


@pytest.mark.parametrize(("number", "expected"), [(2, 1), (8, 4), (32, 16), (100, 16)])
def test_longest_matrix_limits_the_number_of_buckets(number, expected):
    """No bucket is shorter than the longest matrix, and there are at most 16."""
    plan = plan_of(_matrices(number), FREE)
    assert len(plan.buckets) == expected


def test_small_matrices_are_exchanged_in_few_buckets():
    """Small matrices share a bucket, since collectives would cost more than overlap gains."""
    assert len(plan_of(_matrices(100), UNSTACKED).buckets) == 1
    # A bucket of 50 matrices is worth its two collectives, 50 of one are not.
    half_ns = 25 * matrix_ns(_matrices(1)[0], FREE)
    per_collective = CostModel(stack_tiles=1, all_reduce_us=0, collective_us=half_ns / 20_000)
    assert len(plan_of(_matrices(100), per_collective).buckets) == 2


def test_one_long_matrix_makes_one_bucket():
    """One long matrix makes one bucket, as its owner has nothing to do in others."""
    plan = plan_of([*_matrices(4), one_matrix([2048, 2048], num_cols=2048)], UNSTACKED)
    assert len(plan.buckets) == 1


@given(matrix_lists(max_matrices=12), st.sampled_from([1, 2, 3, 5]))
def test_work_of_every_owner_is_balanced_over_buckets(matrices, num_buckets):
    """Buckets of an owner differ by its longest matrix at most."""
    plan = plan_of(matrices, max_owners=1, num_buckets=num_buckets)
    assert len(plan.buckets) <= num_buckets
    indices = [*plan.local, *(index for bucket in plan.buckets for index in bucket)]
    assert sorted(indices) == list(range(len(matrices)))
    loads_ns = [Counter() for _ in plan.buckets]
    longest_ns: Counter[int] = Counter()
    for load_ns, bucket in zip(loads_ns, plan.buckets, strict=True):
        assert list(bucket) == sorted(bucket) and bucket
        for index in bucket:
            (owner,), time_ns = plan.owners[index], matrix_ns(matrices[index], plan.cost)
            load_ns[owner] += time_ns
            longest_ns[owner] = max(longest_ns[owner], time_ns)
    for owner, time_ns in longest_ns.items():
        of_buckets = [load_ns[owner] for load_ns in loads_ns]
        assert max(of_buckets) - min(of_buckets) <= time_ns


def test_number_of_buckets_doubles_while_memory_is_short():
    """Buckets double while memory is short, and no further."""
    plans = [plan_of(_matrices(64), FREE)]
    while not plans[1:] or plans[-1].staging_bytes < plans[-2].staging_bytes:
        plans.append(plan_of(_matrices(64), FREE, staging_bytes=plans[-1].staging_bytes - 1))
    assert [len(plan.buckets) for plan in plans[:-1]] == [16, 32, 64]


@settings(max_examples=20)
@given(matrix_lists(), st.sampled_from([5000, 10_000, 20_000, 2**31]))
def test_memory_named_for_a_limit_that_cannot_be_kept_is_enough(matrices, staging_bytes):
    """The limit that a refusal names is enough."""
    plan = plan_of(matrices, staging_bytes=staging_bytes)
    enough = max(staging_bytes, plan.staging_bytes)
    assert plan_of(matrices, staging_bytes=enough).staging_bytes <= enough


@pytest.mark.parametrize("cells", [[(0,), (1,)], [(0, 2), (1, 3)]])
def test_choosing_buckets_ends_whatever_the_limit(cells):
    """The search for buckets lays out few plans of at most 64 buckets, whatever the limit."""
    layout = rows_cut_at(64, 64, [32, 32])
    matrices = [whole_matrix(f"{i}.weight", layout, [cells]) for i in range(200)]
    with mock.patch.object(StagingLayout, "build", wraps=StagingLayout.build) as build:
        plan_of(matrices, SLOW, staging_bytes=1)
    assert build.call_count <= 200
    assert max(len(call.args[0][0].buckets) for call in build.mock_calls) <= 64
