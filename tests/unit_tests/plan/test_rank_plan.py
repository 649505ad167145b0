# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What one rank does: messages that match those of others, its stacks, and when they run."""

from collections import Counter, defaultdict
from unittest import mock

from helpers.layouts import matrix_lists, one_matrix, plan_of, plans, rows_cut_at, whole_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import RankPlan
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.owners import Assignment
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.plan.staging import BucketSizes


@settings(max_examples=50)
@given(plans())
def test_messages_of_two_ranks_match(plan):
    """What a rank sends is what its peer expects, route by route, in the counted sizes."""
    rank_plans = {rank: RankPlan.build(plan, rank) for rank in plan.ranks}
    nothing = BucketSizes(0, 0, 0, 0, 0)
    for number, indices in enumerate(plan.buckets):
        sizes = plan.sizes.sizes(indices)
        assert set(sizes) <= set(plan.ranks)
        buckets = {rank: rank_plans[rank].buckets[number] for rank in plan.ranks}
        any_rows = any(bucket.sends for bucket in buckets.values())
        assert len({bucket.has_gather for bucket in buckets.values()}) == 1
        for sender, mine in buckets.items():
            assert sender not in mine.sends and mine.has_gather >= any_rows
            assert sizes.get(sender, nothing) == mine.num_elements
            for receiver, theirs in buckets.items():
                assert mine.sends.get(receiver, []) == theirs.receives.get(sender, [])
                results = mine.scatter.sends.get(receiver, [])
                elements = sum(route.num_elements for route in results)
                assert elements == theirs.scatter.receives.get(sender, 0)


@settings(max_examples=50)
@given(plans(max_matrices=12))
def test_every_matrix_is_orthogonalized_by_its_owners_alone_in_one_order(plan):
    """Every matrix is in a stack of its owners alone, which see split ones in one order."""
    found: Counter[tuple[int, int, int]] = Counter()
    orders: dict[tuple[int, tuple[int, ...]], set[tuple]] = defaultdict(set)
    for rank in plan.ranks:
        rank_plan = RankPlan.build(plan, rank)
        buckets = [bucket.owned for bucket in rank_plan.buckets]
        for stack in (stack for owned in [*rank_plan.local, *buckets] for stack in owned.stacks):
            found.update((part.matrix, part.block, rank) for part in stack)
            assert len({(part.num_rows, part.num_cols) for part in stack}) == 1
        for number, owned in enumerate(buckets):
            split = [stack[0] for stack in owned.stacks if len(stack[0].owners) > 1]
            assert split == [stack[0] for stack in owned.stacks][: len(split)]
            for owners in plan.sets_of_owners:
                if rank in owners:
                    blocks = tuple((p.matrix, p.block) for p in split if p.owners == owners)
                    orders[number, owners].add(blocks)
    assert found == Counter(
        (index, block, owner)
        for index, owners in enumerate(plan.owners)
        for block in range(len(plan.matrices[index].blocks))
        for owner in owners
    )
    assert all(len(of_ranks) == 1 for of_ranks in orders.values())


def test_matrix_split_over_its_replicas_is_not_local():
    """A matrix split over its replicas is exchanged, and not local."""
    matrix = whole_matrix("a.weight", rows_cut_at(8, 4, [8]), [[(0, 1)]])
    assignment = Assignment(((0, 1),), {0: 1, 1: 1})
    with mock.patch("megatron_muon.plan.exchange_plan.choose_owners", lambda *_: assignment):
        plan = plan_of([matrix], staging_bytes=5000)
    assert plan.local == () and plan.buckets == ((0,),)
    (bucket,) = RankPlan.build(plan, 0).buckets
    assert [part.num_rows for stack in bucket.owned.stacks for part in stack] == [4]
    assert not bucket.has_gather
    # Both keep their 16 elements, and pass them on.
    assert list(bucket.scatter.sends) == [0] and bucket.scatter.receives == {0: 16}
    assert bucket.scatter.shard.section_size == 16


@settings(max_examples=15)
@given(st.lists(matrix_lists(), min_size=1, max_size=2))
def test_every_local_stack_has_one_turn(lists):
    """Every local stack has one turn, in a round or at the end."""
    built = [plan_of(matrices, staging_bytes=1) for matrices in lists]
    for rank in built[0].ranks:
        schedule = RankSchedule.build(built, rank)
        turns = [action.number for action in schedule.actions if action.kind == "local"]
        assert turns == list(range(len(schedule.local)))
        assert len(schedule.local) == len(schedule.staging.local)
        assert Counter(stack for stacks in schedule.local for stack in stacks) == Counter(
            (plan, number)
            for plan, rank_plan in enumerate(schedule.rank_plans)
            for number, _ in enumerate(rank_plan.local)
        )


def test_local_matrices_are_spread_over_the_rounds_and_the_end():
    """Local matrices are spread over all rounds and the end."""
    local = [one_matrix([64, 0], name=f"local.{i}") for i in range(8)]
    shared = [one_matrix([32, 32], name=f"shared.{i}") for i in range(20)]
    plan = plan_of([*local, *shared], CostModel(stack_tiles=1), num_buckets=3)
    assert len(plan.buckets) == 3 and len(plan.local) == 8
    schedule = RankSchedule.build([plan], 0)
    assert [len(stacks) for stacks in schedule.local] == [2, 2, 2, 2]
