# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The exchange plan: every element travels once there and once to each holder, in known order."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from helpers.planned import assign, planned_in
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_muon.plan.assignment import Assignment
from megatron_muon.plan.rank_schedule import RankSchedule
from megatron_muon.plan.report import build_report

from megatron_muon.plan import ExchangePlan, RankPlan, Route
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, whole_matrix
from megatron_muon.plan.rank_plan import RankBucket
from megatron_muon.plan.routes import parts_of
from megatron_muon.plan.wire import Wire

WIRE = Wire("bfloat16", "bfloat16")
# Newton-Schulz so slow that matrices are split and owners spread.
SLOW = CostModel(tflops=1e-7, all_reduce_us=0, stack_tiles=4)


def _plan(
    matrices: list[MatrixLayout],
    staging_bytes: int = 5000,
    *,
    in_portions: bool = False,
    max_parts: int = 8,
) -> ExchangePlan:
    """Plan; portioned in three portions where nothing is replicated."""
    assignment = assign(matrices, SLOW, WIRE, max_parts=max_parts)
    with planned_in(num_portions=3):
        return ExchangePlan.build(
            matrices, assignment, SLOW, WIRE, staging_bytes=staging_bytes, may_portion=in_portions
        )


# Matrices, and whether they are portioned.
_CASES = st.tuples(matrix_lists(), st.just(False)) | st.tuples(
    matrix_lists(max_replicas=1), st.just(True)
)


def _shards(plan: ExchangePlan, index: int) -> dict[int, np.ndarray]:
    """Give every rank its shard of a matrix of distinct numbers."""
    matrix = plan.matrices[index]
    first, blocks = 0, []
    for rows, cols in matrix.blocks:
        blocks.append(first + np.arange(rows * cols).reshape(rows, cols))
        first += rows * cols
    shapes: dict[int, tuple[int, int]] = {}
    for f in matrix.regions:
        for rank in f.holders:
            rows, _ = shapes.get(rank, (0, 0))
            shapes[rank] = (max(rows, f.local_row + f.num_rows), f.num_cols)
    shards = {rank: np.full(shape, -1) for rank, shape in shapes.items()}
    for f in matrix.regions:
        for rank in f.holders:
            shards[rank][f.local_row : f.local_row + f.num_rows] = blocks[f.block][
                f.row : f.row + f.num_rows, f.col : f.col + f.num_cols
            ]
    return shards


def _local(shard: np.ndarray, route: Route) -> np.ndarray:
    return shard[
        route.local_row : route.local_row + route.num_rows,
        route.local_col : route.local_col + route.num_cols,
    ]


@settings(deadline=None)
@given(_CASES, st.sampled_from([1, 500, 10**6]))
def test_every_element_reaches_its_owner_once_and_returns_to_where_it_was(case, bucket):
    """Gather fills each part exactly; scatter restores every shard of every holder."""
    matrices, in_portions = case
    plan = _plan(matrices, bucket, in_portions=in_portions)
    for index, (matrix, owners) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
        shards = _shards(plan, index)
        assert all((shard >= 0).all() for shard in shards.values())
        parts = {
            (block, part.owner): np.full((part.num_rows, part.num_cols), -1)
            for block, shape in enumerate(matrix.blocks)
            for part in parts_of(index, block, shape, owners)
        }
        back = {rank: np.full(shard.shape, -1) for rank, shard in shards.items()}
        routes = list(plan.routes(index))
        for route in routes:
            part = parts[route.block, route.owner]
            place = np.s_[
                route.row : route.row + route.num_rows, route.col : route.col + route.num_cols
            ]
            assert (part[place] == -1).all()
            part[place] = _local(shards[route.source], route)
        assert all((part >= 0).all() for part in parts.values())
        for route in routes:
            part = parts[route.block, route.owner]
            for holder in route.holders:
                target = _local(back[holder], route)
                assert (target == -1).all()
                target[:] = part[
                    route.row : route.row + route.num_rows, route.col : route.col + route.num_cols
                ]
        for rank, shard in shards.items():
            assert (back[rank] == shard).all()
        largest = Counter()
        for part in parts.values():
            largest.update(part.ravel().tolist())
        assert set(largest.values()) == {1} and len(largest) == matrix.num_elements


@settings(deadline=None)
@given(_CASES)
def test_messages_of_two_ranks_match(case):
    """What a rank sends to another is what that one expects, route by route, in each bucket."""
    matrices, in_portions = case
    plan = _plan(matrices, in_portions=in_portions)
    ranks = matrices[0].ranks
    rank_plans = {rank: RankPlan.build(plan, rank) for rank in ranks}
    seen: Counter[int] = Counter(plan.local)
    for number, bucket in enumerate(plan.buckets):
        seen.update(bucket)
        for sender in ranks:
            mine = rank_plans[sender].buckets[number]
            for receiver in ranks:
                theirs = rank_plans[receiver].buckets[number]
                for there, here in zip(mine.gathers, theirs.gathers, strict=True):
                    assert there.sends.get(receiver, []) == here.receives.get(sender, [])
                for sent, received in zip(mine.scatters, theirs.scatters, strict=True):
                    elements = sum(r.num_elements for r in sent.sends.get(receiver, []))
                    assert elements == received.receives.get(sender, 0)
            for gather in mine.gathers:
                assert (sender in gather.sends) <= mine.is_in_place
                assert mine.has_gather or not (gather.sends or gather.receives)
    assert seen == Counter(range(len(matrices)))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=4),
    st.integers(1, 60),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_what_arrives_in_place_is_the_part_in_order(shards, num_cols, num_parts, in_portions):
    """Rows follow one another by rank, over all columns, until the part is full.

    In a portioned bucket those of a portion do, and columns do not.
    """
    num_rows = sum(shards)
    assume(num_rows > 1)
    matrix = whole_matrix(
        "a.weight", rows_cut_at(num_rows, num_cols, shards), [[(i,) for i in range(len(shards))]]
    )
    owners = tuple(range(num_parts))
    loads = dict.fromkeys(range(len(shards)), 1.0)
    with planned_in(num_portions=3):
        plan = ExchangePlan.build(
            [matrix],
            Assignment((owners,), loads, 1.0),
            SLOW,
            WIRE,
            staging_bytes=2**31,
            may_portion=in_portions,
        )
    assume(plan.buckets)
    assert plan.order.is_portioned == in_portions
    for rank in owners:
        (bucket,) = RankPlan.build(plan, rank).buckets
        ((part,),), rooms = bucket.owned.stacks, bucket.owned.rooms
        has_rows = any(who != rank for gather in bucket.gathers for who in gather.receives)
        assert bucket.is_in_place == (has_rows and (num_rows > num_cols or not in_portions))
        if not bucket.is_in_place:
            continue
        row = 0
        for gather in bucket.gathers:
            for _, routes in sorted(gather.receives.items()):
                for route in routes:
                    assert (route.row, route.col, route.num_cols) == (row, 0, part.num_cols)
                    row += route.num_rows
        assert (row, rooms) == (part.num_rows, (1,))


def test_one_matrix_in_rank_order_arrives_in_place():
    """Also the rows that its owner holds; not where shards are in another order, or two arrive."""

    def buckets(matrices: list[MatrixLayout]) -> list[RankBucket]:
        assignment = Assignment(((1,),) * len(matrices), {0: 0.0, 1: 1.0, 2: 0.0}, 1.0)
        plan = ExchangePlan.build(matrices, assignment, SLOW, WIRE, staging_bytes=2**31)
        return [RankPlan.build(plan, rank).buckets[0] for rank in range(3)]

    layout = rows_cut_at(8, 4, [3, 3, 2])
    ascending = whole_matrix("a.weight", layout, [[(0,), (1,), (2,)]])
    holder, owner, _ = buckets([ascending])
    assert owner.is_in_place and not holder.is_in_place
    # Elements: all rows are received where they are orthogonalized, three of them from itself.
    assert owner.num_elements == (12, 32, 0)
    (gather,) = owner.gathers
    assert list(gather.sends) == [1] and sorted(gather.receives) == [0, 1, 2]

    others = [
        [whole_matrix("a.weight", layout, [[(2,), (1,), (0,)]])],
        [whole_matrix("a.weight", layout, [[(0,), (1,), (2,)]], split_shapes=[4, 4])],
        [ascending, whole_matrix("b.weight", layout, [[(0,), (1,), (2,)]])],
    ]
    for matrices in others:
        _, owner, _ = buckets(matrices)
        count = len(matrices)
        assert not owner.is_in_place and owner.num_elements == (0, 20 * count, 32 * count)


@settings(deadline=None)
@given(_CASES)
def test_without_replicas_the_way_back_is_the_way_there(case):
    """Each scatter message is the gather message between the same two ranks, reversed."""
    matrices, in_portions = case
    plan = _plan(matrices, in_portions=in_portions)
    for rank in matrices[0].ranks:
        for bucket in RankPlan.build(plan, rank).buckets:
            if all(len(route.holders) == 1 for index in range(len(matrices))
                   for route in plan.routes(index)):  # fmt: skip
                for gather, scatter in zip(bucket.gathers, bucket.scatters, strict=True):
                    # Rows that arrive in place come from the owner too; its results need no
                    # message.
                    there = {who: each for who, each in gather.receives.items() if who != rank}
                    assert {who: each for who, each in scatter.sends.items() if each} == there
                    assert [route for route, _ in scatter.arrivals] == [
                        route
                        for who, routes in sorted(gather.sends.items())
                        for route in routes
                        if who != rank
                    ]


@settings(deadline=None)
@given(matrix_lists(max_matrices=12), st.sampled_from([1, 8]))
def test_every_matrix_is_orthogonalized_by_its_owners_and_nobody_else(matrices, max_parts):
    """Also one that is split over just the ranks that hold replicas of it.

    Such a matrix once counted as local, and no rank's local matrices held it: it was never stepped.
    """
    assignment = assign(matrices, SLOW, WIRE, max_parts=max_parts)
    plan = ExchangePlan.build(matrices, assignment, SLOW, WIRE, staging_bytes=5000)
    found = Counter()
    for rank in matrices[0].ranks:
        rank_plan = RankPlan.build(plan, rank)
        for owned in (*rank_plan.local, *(bucket.owned for bucket in rank_plan.buckets)):
            found.update((p.matrix, p.block, rank) for stack in owned.stacks for p in stack)
    assert found == Counter(
        (index, block, owner)
        for index, owners in enumerate(plan.owners)
        for block in range(len(matrices[index].blocks))
        for owner in owners
    )


@settings(deadline=None)
@given(matrix_lists(max_matrices=12))
def test_matrix_with_copies_is_orthogonalized_whole_and_alone(matrices):
    """Where other matrices of its shape are stacked: copies on other ranks may have other plans."""
    plan = _plan(matrices)
    for rank in matrices[0].ranks:
        rank_plan = RankPlan.build(plan, rank)
        for owned in (*rank_plan.local, *(bucket.owned for bucket in rank_plan.buckets)):
            for stack, room in zip(owned.stacks, owned.rooms, strict=True):
                if any(matrices[part.matrix].has_copies for part in stack):
                    assert (len(stack), room, len(stack[0].owners)) == (1, 1, 1)


@settings(deadline=None)
@given(_CASES, st.sampled_from([1, 2**31]))
def test_report_knows_the_memory_and_the_calls_of_each_rank(case, staging_bytes):
    """What the engine stages and runs, without a plan of each rank."""
    matrices, in_portions = case
    plan = _plan(matrices, staging_bytes, in_portions=in_portions)
    report = build_report(range(1 + max(matrices[0].ranks)), [plan])
    for rank in matrices[0].ranks:
        schedule = RankSchedule.build([plan], rank)
        assert report.ranks[rank].staging_bytes == schedule.staging.num_bytes
        (rank_plan,) = schedule.rank_plans
        owned = (*rank_plan.local, *(bucket.owned for bucket in rank_plan.buckets))
        assert report.ranks[rank].num_calls == sum(len(each.stacks) for each in owned)
        assert report.ranks[rank].stack_elements == sum(each.num_elements for each in owned)


@settings(deadline=None)
@given(_CASES)
def test_report_counts_what_messages_hold(case):
    """Elements in the report are those of the messages, rank by rank."""
    matrices, in_portions = case
    plan = _plan(matrices, in_portions=in_portions)
    world_size = 1 + max(matrices[0].ranks)
    report = build_report(range(world_size), [plan])
    for rank in matrices[0].ranks:
        sent = received = 0
        for bucket in RankPlan.build(plan, rank).buckets:
            for gather in bucket.gathers:
                sends, receives = (
                    [route for peer, routes in messages.items() if peer != rank for route in routes]
                    for messages in (gather.sends, gather.receives)
                )
                sent += sum(route.num_elements for route in sends)
                received += sum(route.num_elements for route in receives)
            for scatter in bucket.scatters:
                sent += sum(
                    route.num_elements
                    for peer, routes in scatter.sends.items()
                    for route in routes
                    if peer != rank
                )
                received += sum(n for peer, n in scatter.receives.items() if peer != rank)
                spread = scatter.shard.num_spread if scatter.shard is not None else 0
                sent, received = sent + spread, received + spread
        assert report.ranks[rank].elements_sent == sent
        assert report.ranks[rank].bytes_received == 2 * received
    if all("owner" in matrix for matrix in report.matrices):
        assert sum(rank.bytes_sent for rank in report.ranks) >= report.lower_bound_bytes


def test_plans_that_differ_have_different_entries():
    """An owner, a layout or a bucket that differs shows in the line of its matrix."""

    def entries(rows: list[int]) -> list[str]:
        layout = rows_cut_at(8, 4, rows)
        return _plan([whole_matrix("a.weight", layout, [[(0,), (1,)]])]).entries()

    assert entries([5, 3]) == entries([5, 3])
    assert entries([5, 3]) != entries([6, 2])
    assert entries([5, 3])[0].startswith("a.weight ((8, 4),) layout ")
    assert entries([5, 3])[1].startswith("a.weight owners (")


def test_matrix_that_a_rank_lacks_is_the_first_difference():
    """It changes the owners of others, of which rank 1 was said to differ."""

    def entries(names: str) -> list[str]:
        layout = rows_cut_at(8, 4, [5, 3])
        return _plan([whole_matrix(name, layout, [[(0,), (1,)]]) for name in names]).entries()

    here, there = entries("abc"), entries("ac")
    (first, *_) = (pair for pair in zip(here, there, strict=False) if pair[0] != pair[1])
    assert [line.partition(" ")[0] for line in first] == ["b", "c"]


def test_matrix_split_over_the_ranks_that_hold_replicas_of_it_is_not_local():
    """ZeRO-0 on two ranks: both orthogonalize half of what both have, and exchange the results."""
    matrix = whole_matrix("a.weight", rows_cut_at(8, 4, [8]), [[(0, 1)]])
    assignment = Assignment(((0, 1),), {0: 1.0, 1: 1.0}, 1.0)
    with planned_in(num_scatters=1):
        plan = ExchangePlan.build([matrix], assignment, SLOW, WIRE, staging_bytes=5000)
    assert plan.local == () and plan.buckets == ((0,),)
    (bucket,) = RankPlan.build(plan, 0).buckets
    assert [part.num_rows for stack in bucket.owned.stacks for part in stack] == [4]
    assert not bucket.has_gather
    # Each keeps what it has, and both pass it on.
    (scatter,) = bucket.scatters
    assert list(scatter.sends) == [0] and scatter.receives == {0: 16}
    assert scatter.shard.chunk == 16


def _two_matrices() -> ExchangePlan:
    layouts = [rows_cut_at(8, 4, [8, 0]), rows_cut_at(8, 4, [5, 3])]
    matrices = [
        whole_matrix(f"layer.{index}.weight", layout, [[(0,), (1,)]])
        for index, layout in enumerate(layouts)
    ]
    return _plan(matrices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"buckets": ()},
            r"layer.1.weight: expected to be local or in one bucket, got it listed 0",
        ),
        ({"buckets": ((1,), (1,))}, "layer.1.weight: .* got it listed 2 times"),
        ({"local": (), "buckets": ((1,),)}, "layer.0.weight: .* got it listed 0 times"),
        ({"local": (0, 1), "buckets": ()}, "layer.1.weight: expected a local matrix to be whole"),
        (
            {"assignment": Assignment(((0,), (7,)), {0: 1.0, 1: 1.0}, 1.0)},
            r"layer.1.weight: expected owners among the ranks of its domain, got \(7,\)",
        ),
        (
            {"assignment": Assignment(((0,),), {0: 1.0, 1: 1.0}, 1.0)},
            "expected owners of 2 matrices, got 1",
        ),
    ],
)
def test_plan_that_would_lose_or_repeat_a_matrix_is_refused(change, message):
    """A matrix that is in no list would silently never be stepped."""
    plan = _two_matrices()
    assert plan.local == (0,) and plan.buckets == ((1,),)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, **change)


def test_rank_with_other_replicas_in_another_matrix_is_refused():
    """It would pass results on in a group that not all of them are in."""
    matrices = [
        whole_matrix(f"{i}.weight", rows_cut_at(8, 4, [4, 4]), [cells])
        for i, cells in enumerate([[(0, 1), (2, 3)], [(0, 2), (1, 3)]])
    ]
    with pytest.raises(ValueError, match=r"1.weight: expected the replicas of rank 0 to be"):
        _plan(matrices)


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        (("standard", "symmetric"), ["symmetric", "standard"]),
        (("gram", "gram_symmetric"), ["gram_symmetric", "gram"]),
    ],
)
def test_copies_are_left_to_torch(backends, expected):
    """A kernel that chooses its tiles by timing may have other bits on another rank."""
    whole = whole_matrix("whole", rows_cut_at(4096, 8192, [4096]), [[(0,)]])
    matrices = [whole, dataclasses.replace(whole, has_copies=True)]
    cost = CostModel(backends=backends)
    assignment = assign(matrices, cost, WIRE)
    plan = ExchangePlan.build(matrices, assignment, cost, WIRE, staging_bytes=2**31)
    assert [plan.backend(index, 0) for index in (0, 1)] == expected
    who = plan.entries()[len(matrices) : 2 * len(matrices)]
    assert all(line.endswith(f"by {name}") for name, line in zip(expected, who, strict=True))
