# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The step of one rank: messages, stacks, their order, and their places in staging memory."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any
from unittest import mock

from helpers.layouts import matrix_lists, one_matrix, plan_of, plans, rows_cut_at, whole_matrix
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_muon.plan import ExchangePlan, RankPlan
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.rank_plan import Move, RankBucket, RankSchedule
from megatron_muon.plan.routes import parts_of, stack_elements
from megatron_muon.plan.schedule import DEPTH, actions_of, rounds_of
from megatron_muon.plan.staging import BucketSizes, PlanStaging, StagingLayout

# Names of elements, (matrix, block, row, column), by place in a buffer, or in a shard by row and
# column.
type Memory = dict[Any, tuple[int, int, int, int]]


def _joined_over_tensor_ranks() -> ExchangePlan:
    """Plan matrices that any rank owns, beside ones of a tensor rank alone; with replicas."""
    cells = [[(0, 4), (2, 6)], [(1, 5), (3, 7)]]  # by tensor rank and shard
    layout = rows_cut_at(12, 8, [7, 5])
    joined = [whole_matrix(f"joined.{i}", layout, cells, partition_dim=0) for i in range(6)]
    alone = [whole_matrix(f"alone.{i}", layout, [cells[i % 2]]) for i in range(6)]
    return plan_of([*joined, *alone], CostModel(ranks_per_node=4, stack_tiles=1), num_buckets=2)


@settings(max_examples=30)
@given(plans(max_matrices=4))
# Owners on another tensor rank once left these out, and sent more than their receivers expected.
@example(_joined_over_tensor_ranks())
def test_rows_come_to_their_owners_and_results_to_all_holders(plan):
    """Moves and messages fill every part once, and write every element of every shard once."""
    rank_plans = {rank: RankPlan.build(plan, rank) for rank in plan.ranks}
    shards = {rank: _shards(plan, rank) for rank in plan.ranks}
    written: dict[int, list[Memory]] = {rank: [{} for _ in shards[rank]] for rank in plan.ranks}
    for rank, rank_plan in rank_plans.items():
        for bucket in rank_plan.local:
            stacks: Memory = {}
            _move(bucket.moves["keep"], [{}, *shards[rank]], [stacks])
            _check_stacks(plan, bucket, stacks)
            _move(bucket.moves["stay"], [stacks], [{}, *written[rank]])
    for number in range(len(plan.buckets)):
        buckets = {rank: rank_plans[rank].buckets[number] for rank in plan.ranks}
        sent = {rank: _packed(b.moves["pack"], [{}, *shards[rank]]) for rank, b in buckets.items()}
        received = _delivered(sent, {rank: b.gather for rank, b in buckets.items()})
        returned = {}
        for rank, bucket in buckets.items():
            stacks = {}
            _move(bucket.moves["unpack"], [dict(enumerate(received[rank]))], [stacks])
            _move(bucket.moves["keep"], [{}, *shards[rank]], [stacks])
            _check_stacks(plan, bucket, stacks)
            _move(bucket.moves["stay"], [stacks], [{}, *written[rank]])
            returned[rank] = _packed(bucket.moves["return"], [stacks])
        arrived = _delivered(returned, {rank: b.scatter for rank, b in buckets.items()})
        for rank, bucket in buckets.items():
            replicas = _replicas(plan, rank)
            size = bucket.num_elements.scatter_receive // len(replicas)
            memory = {
                position * size + i: name
                for position, replica in enumerate(replicas)
                for i, name in enumerate(arrived[replica])
            }
            _move(bucket.moves["arrive"], [memory], [{}, *written[rank]])
    assert written == shards


def _shards(plan: ExchangePlan, rank: int) -> list[Memory]:
    """Return the shards of a rank, in the order of matrices."""
    shards = []
    for index, matrix in enumerate(plan.matrices):
        regions = [region for region in matrix.regions if rank in region.holders]
        names = {
            (region.local_row + i, j): (index, region.block, region.row + i, region.col + j)
            for region in regions
            for i in range(region.num_rows)
            for j in range(region.num_cols)
        }
        shards += [names] if names else []
    return shards


def _replicas(plan: ExchangePlan, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same rows."""
    regions = (region for matrix in plan.matrices for region in matrix.regions)
    return next((region.holders for region in regions if rank in region.holders), (rank,))


def _move(moves: Iterable[Move], sources: list[Memory], targets: list[Memory]) -> None:
    """Move names; the first memory is a buffer, and shards follow."""
    for *sides, num_rows, num_cols, _ in moves:
        for i in range(num_rows):
            for j in range(num_cols):
                (source, from_), (target, to) = (
                    (number, (row + i, col + j) if number else col + i * stride + j)
                    for number, row, col, stride in (sides[:4], sides[4:])
                )
                assert to not in targets[target]
                targets[target][to] = sources[source][from_]


def _packed(moves: Iterable[Move], sources: list[Memory]) -> list[Any]:
    message: Memory = {}
    _move(moves, sources, [message])
    return [message[i] for i in range(len(message))]


def _delivered(sent: dict[int, list[Any]], messages: dict[int, Any]) -> dict[int, list[Any]]:
    """Carry out an all-to-all, if ranks take part; nobody is sent another number than expected."""
    received: dict[int, list[Any]] = {rank: [] for rank in sent}
    assert len({message is None for message in messages.values()}) == 1
    for sender, message in messages.items() if None not in messages.values() else ():
        end = 0
        for receiver in sorted(sent):
            size = message.sends.get(receiver, 0)
            assert size == messages[receiver].receives.get(sender, 0)
            received[receiver] += sent[sender][end : end + size]
            end += size
        assert end == len(sent[sender])
    return received


def _check_stacks(plan: ExchangePlan, bucket: RankBucket, memory: Memory) -> None:
    """Compare stacks with the parts of this rank, element by element."""
    first, expected = 0, {}
    for stack in bucket.stacks:
        for number, part in enumerate(stack):
            start = first + number * part.num_rows * part.num_cols
            assert part in parts_of(*part[:2], plan.matrices[part[0]].blocks[part[1]], part.owners)
            expected |= {
                start + i * part.num_cols + j: (*part[:2], part.row + i, part.col + j)
                for i in range(part.num_rows)
                for j in range(part.num_cols)
            }
        first += stack_elements(stack)
    assert memory == expected


@settings(max_examples=50)
@given(plans(max_matrices=12))
def test_every_matrix_is_orthogonalized_by_its_owners_alone_in_one_order(plan):
    """Every matrix is in a stack of its owners alone, which see split ones in one order."""
    found: Counter[tuple[int, int, int]] = Counter()
    orders: dict[tuple[int, tuple[int, ...]], set[tuple]] = defaultdict(set)
    for rank in plan.ranks:
        rank_plan = RankPlan.build(plan, rank)
        for stack in (s for b in [*rank_plan.local, *rank_plan.buckets] for s in b.stacks):
            found.update((part.matrix, part.block, rank) for part in stack)
            assert len({(part.num_rows, part.num_cols) for part in stack}) == 1
        for number, bucket in enumerate(rank_plan.buckets):
            split = [stack[0] for stack in bucket.stacks if len(stack[0].owners) > 1]
            assert split == [stack[0] for stack in bucket.stacks][: len(split)]
            for owners in {owners for owners in plan.owners if len(owners) > 1}:
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
    with mock.patch("megatron_muon.plan.exchange_plan.choose_owners", lambda *_: ((0, 1),)):
        plan = plan_of([matrix], staging_bytes=5000)
    assert plan.local == () and plan.buckets == ((0,),)
    (bucket,) = RankPlan.build(plan, 0).buckets
    assert [part.num_rows for stack in bucket.stacks for part in stack] == [4]
    assert bucket.gather is None
    # Both keep their 16 elements, and pass them on.
    assert bucket.scatter == ({0: 16}, {0: 16}) and bucket.num_elements.scatter_receive == 32


@settings(max_examples=15)
@given(st.lists(matrix_lists(), min_size=1, max_size=2))
def test_every_local_stack_has_one_turn(lists):
    """Every local stack has one turn, in a round or at the end."""
    built = [plan_of(matrices, staging_bytes=1) for matrices in lists]
    for rank in built[0].ranks:
        schedule = RankSchedule.build(built, rank)
        turns = [(a.plan, a.number) for a in schedule.actions if a.kind == "local_matrices"]
        assert turns == [
            (plan, number)
            for plan, rank_plan in enumerate(schedule.rank_plans)
            for number, _ in enumerate(rank_plan.local, len(rank_plan.buckets))
        ]
        for rank_plan, offsets in zip(schedule.rank_plans, schedule.offsets, strict=True):
            assert len(offsets) == len(rank_plan.buckets) + len(rank_plan.local)


def test_local_matrices_are_spread_over_the_rounds_and_the_end():
    """Local matrices are spread over all rounds and the end."""
    local = [one_matrix([64, 0], name=f"local.{i}") for i in range(8)]
    shared = [one_matrix([32, 32], name=f"shared.{i}") for i in range(20)]
    plan = plan_of([*local, *shared], CostModel(stack_tiles=1), num_buckets=3)
    assert len(plan.buckets) == 3 and len(plan.local) == 8
    kinds = [action.kind for action in RankSchedule.build([plan], 0).actions]
    waits = [i for i, kind in enumerate(kinds) if kind == "wait_for_gather"]
    assert [kinds[:i].count("local_matrices") for i in (*waits, len(kinds))] == [2, 4, 6, 8]


NUM_BUCKETS = st.integers(0, 6)


def _of_plan(num_buckets: list[int], plan: int) -> list[tuple[str, int]]:
    """Return what a rank does for one of its plans, in order."""
    actions = [
        action for action in actions_of(tuple(num_buckets)) if action.kind != "local_matrices"
    ]
    return [(action.kind, action.number) for action in actions if action.plan == plan]


@given(st.lists(NUM_BUCKETS, min_size=1, max_size=3))
def test_order_of_a_plans_actions_does_not_depend_on_other_plans(num_buckets):
    """The order of one plan's actions does not depend on other plans of a rank."""
    for plan, end in enumerate(num_buckets):
        assert _of_plan(num_buckets, plan) == _of_plan([end], 0)


@given(NUM_BUCKETS)
def test_each_action_comes_once_in_order_and_after_what_it_needs(end):
    """Each action comes once, after those that it needs."""
    log = _of_plan([end], 0)
    of_bucket = (
        "start_gather",
        "wait_for_gather",
        "orthogonalize",
        "start_scatter",
        "finish_scatter",
    )
    for kind in of_bucket:
        numbers = [number for other, number in log if other == kind]
        assert numbers == list(range(end))
    for bucket in range(end):
        positions = [log.index((kind, bucket)) for kind in of_bucket]
        assert positions == sorted(positions)
    # Gathers of two buckets and scatters of two are in flight during Newton-Schulz.
    ahead = behind = 0
    for kind, number in log:
        ahead += (kind == "start_gather") - (kind == "wait_for_gather")
        behind += (kind == "start_scatter") - (kind == "finish_scatter")
        assert ahead <= DEPTH and behind <= DEPTH
        if kind == "orthogonalize":
            assert ahead == min(DEPTH, end - number - 1)
            assert behind == min(DEPTH, number)


@given(st.lists(NUM_BUCKETS, min_size=1, max_size=3))
def test_local_matrices_are_due_while_a_gather_is_in_flight(num_buckets):
    """Local matrices are due before each wait for rows, and at the end."""
    kinds = [action.kind for action in actions_of(tuple(num_buckets))]
    waits = [number for number, kind in enumerate(kinds) if kind == "wait_for_gather"]
    end = len(kinds) - 1 - kinds[::-1].index("local_matrices")
    assert [n for n, kind in enumerate(kinds) if kind == "local_matrices"] == [
        *(n - 1 for n in waits),
        end,
    ]
    assert set(kinds[end + 1 :]) <= {"finish_scatter"}


def test_plans_get_through_their_buckets_evenly():
    """Buckets of a shorter plan are spread evenly among those of a longer one."""
    assert rounds_of([4, 2]) == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    assert rounds_of([0, 2]) == [(1, 0), (1, 1)] and rounds_of([0]) == []


_SIZES = st.integers(0, 3000)


@st.composite
def _plans(draw: st.DrawFn) -> list[PlanStaging]:
    """Draw up to two plans with buffers of any size."""
    plans = []
    for _ in range(draw(st.integers(0, 2))):
        buckets = range(draw(NUM_BUCKETS))
        sizes = tuple(BucketSizes(*(draw(_SIZES) for _ in range(5))) for _ in buckets)
        plans.append(PlanStaging(sizes, draw(_SIZES)))
    return plans


# By kind of an action: buffers of its bucket that come into use, and those that end with it.
_BUFFERS: dict[str, tuple[list[str], list[str]]] = {
    "start_gather": (["gather_send", "gather_receive"], []),
    "wait_for_gather": ([], ["gather_send"]),
    "orthogonalize": (["stacks"], ["gather_receive"]),
    "start_scatter": (["scatter_send", "scatter_receive"], ["stacks"]),
    "finish_scatter": ([], ["scatter_send", "scatter_receive"]),
}


def _moments(plans: list[PlanStaging], layout: StagingLayout) -> list[list[range]]:
    """Return the bytes that are in use at each action, from the list in plan/schedule.py."""
    local_bytes = max((each.local for each in plans), default=0)
    moments = []
    in_use: dict[tuple, range] = {}
    for action, plan, number in actions_of(tuple(len(each.buckets) for each in plans)):
        if action == "local_matrices":
            place = layout.local[number]
            moments.append([*in_use.values(), range(place, place + local_bytes)])
            continue
        begins, ends = _BUFFERS[action]
        sizes, places = plans[plan].buckets[number], layout.plans[plan][number]
        for buffer in begins:
            first = getattr(places, buffer)
            in_use[plan, number, buffer] = range(first, first + getattr(sizes, buffer))
        moments.append(list(in_use.values()))
        for buffer in ends:
            del in_use[plan, number, buffer]
    assert not in_use
    return moments


@given(_plans())
def test_buffers_that_are_alive_together_do_not_overlap(plans):
    """Buffers that are alive together are apart, aligned, and within the arena."""
    layout = StagingLayout.build(plans)
    most = 0
    for in_use in _moments(plans, layout):
        used = sorted((place for place in in_use if place), key=lambda place: place.start)
        for first, second in zip(used, used[1:], strict=False):
            assert first.stop <= second.start
        assert all(place.start % 256 == 0 and place.stop <= layout.num_bytes for place in used)
        most = max(most, sum(-(-len(place) // 256) * 256 for place in used))
    assert most <= layout.num_bytes


def test_equal_buckets_need_ten_buffers_however_many_they_are():
    """Any number of equal buckets needs ten buffers."""
    for count in (5, 6, 9):
        # While the stacks are filled: messages of the next gathers, rows that arrived, stacks, and
        # messages of the scatters before.
        plan = PlanStaging((BucketSizes(*[1024] * 5),) * count, 0)
        assert StagingLayout.build([plan]).num_bytes == 10 * 1024


def test_results_of_two_buckets_are_in_memory_at_a_time():
    """Results of at most two buckets are in memory at a time."""
    sizes = []
    for count in (1, 8):
        sections = BucketSizes(0, 0, 0, 0, 8192 // count)
        plan = PlanStaging((sections,) * count, 0)
        sizes.append(StagingLayout.build([plan]).num_bytes)
    assert sizes == [8192, 2048]
