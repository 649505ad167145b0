# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Counts for all ranks at once are those of the messages, stacks and buffers of every rank."""

from helpers.layouts import plans
from hypothesis import given, settings

from megatron_muon.plan import RankPlan
from megatron_muon.plan.sizes import RankSizes
from megatron_muon.plan.staging import BucketSizes, ScatterSizes, StagingLayout


@settings(max_examples=50)
@given(plans())
def test_sizes_of_every_rank_are_those_of_its_rank_plan(plan):
    """To the element: with and without replicas, split matrices, blocks, and several scatters."""
    nothing = RankSizes(BucketSizes(0, 0, 0), (ScatterSizes(0, 0),) * plan.num_scatters)
    rank_plans = {rank: RankPlan.build(plan, rank) for rank in plan.ranks}
    for number, indices in enumerate(plan.buckets):
        sizes = plan.sizes.sizes(indices, plan.num_scatters)
        assert set(sizes) <= set(plan.ranks)
        for rank, rank_plan in rank_plans.items():
            bucket = rank_plan.buckets[number]
            expected = bucket.num_elements, tuple(each.num_elements for each in bucket.scatters)
            assert sizes.get(rank, nothing) == expected


@settings(max_examples=50)
@given(plans())
def test_staging_bytes_of_a_plan_are_those_of_its_fullest_rank(plan):
    """To the byte: it is what the engine of that rank allocates."""
    layouts = [
        StagingLayout.build([RankPlan.build(plan, rank).staging(plan.dtypes)])
        for rank in plan.ranks
    ]
    assert plan.staging_bytes == max(layout.num_bytes for layout in layouts)
