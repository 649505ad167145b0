# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The step of one rank over all of its plans, as integers: messages, stacks and moves of rows.

A *move* copies a rectangle. Moves that are made together are one table of integers, which the
kernel of ``megatron_muon.runtime.row_kernel`` reads as it is. A bucket has six tables::

    updates --pack--> gather_send ~~~> gather_receive --unpack--> stacks
    updates --keep----------------------------------------------> stacks
    results <--arrive-- scatter_receive <~~~ scatter_send <--return-- stacks
    results <--stay---------------------------------------------- stacks
"""

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import Ranks
from megatron_muon.plan.routes import (
    Route,
    Stack,
    results_of,
    routes_of,
    section_size,
    stack_elements,
)
from megatron_muon.plan.schedule import Action, actions_of
from megatron_muon.plan.staging import BucketSizes, PlanStaging, StagingLayout

# Sources and targets by table: shards of updates or of results, or a buffer of BucketSizes.
TABLES = {
    "pack": ("updates", "gather_send"),
    "keep": ("updates", "stacks"),
    "unpack": ("gather_receive", "stacks"),
    "return": ("stacks", "scatter_send"),
    "arrive": ("scatter_receive", "results"),
    "stay": ("stacks", "results"),
}
# Number of a tensor, first row and column in it, and row stride; 0 for the tensor's own stride. All
# buffers have number 0, and one row. Shards are numbered from 1 in the order of matrices; numbers
# of a second input (gradients beside weights) follow.
type _Place = tuple[int, int, int, int]
# Source and target, rows, columns, and the position of the block among all blocks of the plan.
type Move = tuple[int, ...]
# Routes with the ranks that they are sent to, or received from.
type _Routes = list[tuple[int, Route]]
# Index of an input, route, and its place.
type _Placed = tuple[int, Route, _Place]


class Message(NamedTuple):
    """Elements of one rank in one ``all_to_all_single``, by rank of the job.

    Args:
        sends: By receiver.
        receives: By sender.
    """

    sends: Mapping[int, int]
    receives: Mapping[int, int]


@dataclass(frozen=True)
class RankBucket:
    """Messages, stacks and moves of one rank in one bucket, or of one stack of local matrices.

    Args:
        stacks: Stacks of parts of one shape, end to end in memory.
        gather: Rows. None if no rank of the domain sends any, as with replicas of whole matrices.
        scatter: Results; with replicas also results for itself.
        num_elements: Elements of its buffers. With replicas, scatters are received in sections of
            one size, a section per replica.
        moves: Moves by name of their table. Results for rows of the owner itself *stay*, if there
            are no replicas; other results *arrive*.
    """

    stacks: tuple[Stack, ...]
    gather: Message | None
    scatter: Message
    num_elements: BucketSizes
    moves: Mapping[str, Sequence[Move]]


@dataclass(frozen=True)
class RankPlan:
    """Part of one rank in a plan.

    Args:
        local: Stacks of local matrices, one by one.
        buckets: All buckets of the plan, as the rank joins all collectives.
        staging: Staging memory of the plan.
    """

    local: tuple[RankBucket, ...]
    buckets: tuple[RankBucket, ...]
    staging: PlanStaging

    @classmethod
    def build(cls, plan: ExchangePlan, rank: int) -> "RankPlan":
        """Return the part of one rank in a plan of its domain."""
        builder = _Builder(plan, rank)
        stacks = builder.stacks(plan.local)
        local = tuple(builder.bucket({p.matrix for p in stack}, [stack]) for stack in stacks)
        buckets = tuple(builder.bucket(bucket, builder.stacks(bucket)) for bucket in plan.buckets)
        staging = PlanStaging(
            tuple(bucket.num_elements.in_bytes(plan.dtypes) for bucket in buckets),
            max((b.num_elements.in_bytes(plan.dtypes).stacks for b in local), default=0),
        )
        return cls(local, buckets, staging)


class _Builder:
    """Build the part of one rank in a plan."""

    def __init__(self, plan: ExchangePlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        held = (i for i, matrix in enumerate(plan.matrices) if rank in matrix.elements_by_rank)
        self._number = {index: number for number, index in enumerate(held, 1)}
        sizes = (len(matrix.blocks) for matrix in plan.matrices)
        self._first_block = list(itertools.accumulate(sizes, initial=0))

    def stacks(self, indices: Iterable[int]) -> list[Stack]:
        """Return the stacks of this rank for some matrices."""
        owned = (index for index in indices if self._rank in self._plan.owners[index])
        return self._plan.stacks(owned)[self._rank]

    def bucket(self, indices: Iterable[int], stacks: Sequence[Stack]) -> RankBucket:
        """Return messages and moves of a bucket, or of local matrices in one stack."""
        rank, indices = self._rank, sorted(indices)
        parts, num_stacked = _parts(stacks)
        num_inputs = self._plan.dtypes.num_inputs
        # Other blocks of local matrices are in other stacks.
        routes = [
            route
            for index in indices
            for route in self._routes(index)
            if route.owner != rank or (route.matrix, route.block) in parts
        ]
        kept = [route for route in routes if route.source == route.owner == rank]
        # Only one of several replicas sends its rows.
        sends = [(r.owner, r) for r in routes if r.source == rank != r.owner]
        receives = [(r.source, r) for r in routes if r.owner == rank != r.source]
        returns, received, arrivals, num_arrived = self._scatter(routes)
        gather = Message(_elements(sends, num_inputs), _elements(receives, num_inputs))
        scatter = Message(_elements(returns), received)
        sent, num_received, returned = (sum(e.values()) for e in (*gather, scatter.sends))

        def in_stack(route: Route, index: int = 0) -> _Place:
            """Return the place of a route in the stack of its part."""
            first, num_cols = parts[route.matrix, route.block]
            first += index * num_stacked
            return 0, 0, first + route.row * num_cols + route.col, num_cols

        def in_shard(route: Route, index: int = 0) -> _Place:
            """Return the place of a route in this rank's shard of the matrix."""
            number = self._number[route.matrix] + index * len(self._number)
            return number, route.local_row, route.local_col, 0

        def moves(placed: Iterable[tuple[Route, _Place, _Place]]) -> list[Move]:
            """Return a table of moves, from routes with their sources and targets."""
            return [
                (*source, *to, r.num_rows, r.num_cols, self._first_block[r.matrix] + r.block)
                for r, source, to in placed
            ]

        return RankBucket(
            tuple(stacks),
            gather if self._has_gather(indices) else None,
            scatter,
            BucketSizes(sent, num_received, num_inputs * num_stacked, returned, num_arrived),
            {
                "pack": moves(
                    (r, in_shard(r, i), at) for i, r, at in _consecutive(sends, num_inputs)
                ),
                "keep": moves(
                    (r, in_shard(r, i), in_stack(r, i)) for i in range(num_inputs) for r in kept
                ),
                "unpack": moves(
                    (r, at, in_stack(r, i)) for i, r, at in _consecutive(receives, num_inputs)
                ),
                "return": moves((r, in_stack(r), at) for _, r, at in _consecutive(returns)),
                "arrive": moves((r, at, in_shard(r)) for r, at in arrivals),
                "stay": moves((r, in_stack(r), in_shard(r)) for r in kept if len(r.holders) == 1),
            },
        )

    def _routes(self, index: int) -> Iterator[Route]:
        """Yield the routes of a matrix that this rank has to know."""
        plan, rank = self._plan, self._rank
        matrix = plan.matrices[index]
        # Most of thousands of ranks neither hold nor own a matrix. With replicas, which all shards
        # have or none, their messages decide the sections of this rank's results.
        sees_all = len(matrix.regions[0].holders) > 1 or rank in plan.owners[index]
        if sees_all or rank in matrix.elements_by_rank:
            yield from routes_of(index, matrix, plan.owners[index], None if sees_all else rank)

    def _has_gather(self, indices: Iterable[int]) -> bool:
        return any(
            owner not in region.holders
            for index in indices
            for region in self._plan.matrices[index].regions
            for owner in self._plan.owners[index]
        )

    def _scatter(
        self, routes: Iterable[Route]
    ) -> tuple[_Routes, dict[int, int], list[tuple[Route, _Place]], int]:
        """Return results by holder, elements by owner, arrivals, and the elements in their memory.

        Results of kept rows without replicas stay.
        """
        rank = self._rank
        returns: _Routes = []
        received: Counter[int] = Counter()
        arrivals: list[tuple[Route, _Place]] = []
        num_arrived = 0
        by_holders: dict[Ranks, list[Route]] = defaultdict(list)
        for route in routes:
            if len(route.holders) > 1 or route.source != route.owner:
                by_holders[route.holders].append(route)
        for holders, results in by_holders.items():
            if rank not in holders and all(route.owner != rank for route in results):
                continue
            size = section_size(len(holders), sum(route.num_elements for route in results))
            num_arrived += size * len(holders) * (rank in holders)
            for offset, result in results_of(results, size):
                holder = holders[offset // size]
                if result.owner == rank:
                    returns.append((holder, result))
                if holder == rank:
                    received[result.owner] += result.num_elements
                if rank in holders:
                    arrivals.append((result, (0, 0, offset, result.num_cols)))
        return returns, received, arrivals, num_arrived


def _parts(stacks: Iterable[Stack]) -> tuple[dict[tuple[int, int], tuple[int, int]], int]:
    """Return first element and columns of parts by matrix and block, and the elements of all."""
    parts: dict[tuple[int, int], tuple[int, int]] = {}
    end = 0
    for stack in stacks:
        for number, part in enumerate(stack):
            first = end + number * part.num_rows * part.num_cols
            parts[part.matrix, part.block] = first, part.num_cols
        end += stack_elements(stack)
    return parts, end


def _consecutive(message: _Routes, num_inputs: int = 1) -> Iterator[_Placed]:
    """Yield routes in the order of ranks and inputs, and their places in a message."""
    first = 0
    placed = [(rank, index, route) for index in range(num_inputs) for rank, route in message]
    for _, index, route in sorted(placed, key=operator.itemgetter(0, 1)):
        yield index, route, (0, 0, first, route.num_cols)
        first += route.num_elements


def _elements(message: _Routes, num_inputs: int = 1) -> Counter[int]:
    """Return the elements of a message by rank."""
    elements: Counter[int] = Counter()
    for rank, route in message:
        elements[rank] += num_inputs * route.num_elements
    return elements


@dataclass(frozen=True)
class RankSchedule:
    """The step of one rank.

    Args:
        rank_plans: Part of the rank, by plan.
        actions: Actions of the step, in order. ``local_matrices`` is one stack; its
            number follows the numbers of buckets.
        offsets: Offsets of buffers in the arena, by plan: of buckets, then of local stacks.
        staging_bytes: Size of the arena.
    """

    rank_plans: tuple[RankPlan, ...]
    actions: tuple[Action, ...]
    offsets: tuple[tuple[BucketSizes, ...], ...]
    staging_bytes: int

    @classmethod
    def build(cls, plans: Sequence[ExchangePlan], rank: int) -> "RankSchedule":
        """Return the step of one rank, with the plans of its domains in their order."""
        rank_plans = tuple(RankPlan.build(plan, rank) for plan in plans)
        staging = StagingLayout.build([rank_plan.staging for rank_plan in rank_plans])
        local = [
            (p, len(rank_plan.buckets) + n)
            for p, rank_plan in enumerate(rank_plans)
            for n in range(len(rank_plan.local))
        ]
        offsets: list[list[BucketSizes]] = [list(buckets) for buckets in staging.plans]
        actions: list[Action] = []
        for action in actions_of(tuple(len(plan.buckets) for plan in plans)):
            if action.kind != "local_matrices":
                actions.append(action)
                continue
            # Local matrices are spread evenly over the rounds and the end of the step. Rounded up:
            # the first slots fill the time of a gather, and come before the others.
            slot, num_slots = action.number, len(staging.local)
            first, end = (-(-len(local) * n // num_slots) for n in (slot, slot + 1))
            for number_of_plan, number in local[first:end]:
                actions.append(Action("local_matrices", number_of_plan, number))
                offsets[number_of_plan].append(BucketSizes(0, 0, staging.local[slot], 0, 0))
        return cls(rank_plans, tuple(actions), tuple(map(tuple, offsets)), staging.num_bytes)
