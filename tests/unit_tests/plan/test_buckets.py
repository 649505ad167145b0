# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How many buckets there are, what is in them, and how memory changes that."""

from collections import Counter
from unittest import mock

import pytest
from helpers.layouts import SLOW, matrix_lists, one_matrix, plan_of, rows_cut_at, whole_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.owners import matrix_ns
from megatron_muon.plan.staging import StagingLayout

UNSTACKED = CostModel(stack_tiles=1)
# Collectives that cost nothing: buckets may be as short as their longest matrix.
FREE = CostModel(stack_tiles=1, all_reduce_us=0, collective_us=0)


def _matrices(number: int, rows: int = 32) -> list:
    return [one_matrix([rows, rows], name=f"{index}.weight") for index in range(number)]


@pytest.mark.parametrize(("number", "expected"), [(2, 1), (8, 4), (32, 16), (100, 16)])
def test_longest_matrix_limits_the_number_of_buckets(number, expected):
    """No bucket is shorter than the longest matrix, and there are at most 16."""
    plan = plan_of(_matrices(number), FREE)
    assert len(plan.buckets) == expected == plan.order.num_buckets


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
