# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a domain: equal on all ranks, complete, and within memory or refused."""

import copy
import dataclasses
import re

from helpers.layouts import matrix_lists, one_matrix, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.exchange_plan import staging_problem


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
    """An owner, a layout or a bucket that differs shows in the line of its matrix."""
    plan = _plan_of_rows([5, 3])
    assert plan.entries() == _plan_of_rows([5, 3]).entries()
    assert plan.entries() != _plan_of_rows([6, 2]).entries()
    what, who, order = plan.entries()
    assert what.startswith("a.weight ((8, 4),) layout ") and who.startswith("a.weight owners (")
    other = plan.order._replace(num_buckets=2)
    assert dataclasses.replace(plan, order=other).entries() == [what, who, str(other)]
    assert order == str(plan.order)


def test_matrix_that_a_rank_lacks_is_the_first_difference():
    """A missing matrix is named before the owners that it changes."""
    here, there = (_plan_of_rows([5, 3], names).entries() for names in ("abc", "ac"))
    (first, *_) = (pair for pair in zip(here, there, strict=False) if pair[0] != pair[1])
    assert [line.partition(" ")[0] for line in first] == ["b.weight", "c.weight"]


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
