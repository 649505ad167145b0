# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The step of one rank over all of its plans: messages, stacks, and their order."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.replicas import ShardScatter, routes_of_share, scatters_of
from megatron_muon.plan.routes import Part, Route, parts_of
from megatron_muon.plan.schedule import Action, PlanOrder, actions_of
from megatron_muon.plan.settings import CommDtypes
from megatron_muon.plan.staging import BucketSizes, PlanStaging, ScatterSizes, StagingLayout

type Stack = tuple[Part, ...]
# The routes of a message, by the rank at its other end. Both ends list them in plan order.
type Messages = Mapping[int, Sequence[Route]]


class Arrival(NamedTuple):
    """Results for this rank's rows in the memory of a scatter.

    Args:
        route: The rectangle, whole or a part of one.
        offset: Its first element.
    """

    route: Route
    offset: int


@dataclass(frozen=True)
class OwnedStacks:
    """Stacks that one rank orthogonalizes together.

    Args:
        stacks: Stacks of parts of one shape.
        kept: Routes whose owner and holder it is: their rows are here already.
    """

    stacks: tuple[Stack, ...]
    kept: tuple[Route, ...]

    @property
    def staying(self) -> tuple[Route, ...]:
        """Kept routes whose results stay too: with replicas they come back with all others."""
        return tuple(route for route in self.kept if len(route.holders) == 1)

    @property
    def num_elements(self) -> int:
        """Elements of all stacks."""
        return sum(part.num_rows * part.num_cols for stack in self.stacks for part in stack)


@dataclass(frozen=True)
class RankScatter:
    """Messages of one rank in one scatter.

    Args:
        sends: Results for each holder, itself included where others hold the same rows.
        receives: Elements from each owner.
        arrivals: Results for its rows, once replicas have passed them on.
        shard: What the replicas of its shard get; None where it gets nothing in this bucket.
    """

    sends: Messages
    receives: Mapping[int, int]
    arrivals: tuple[Arrival, ...]
    shard: ShardScatter | None

    @property
    def num_elements(self) -> ScatterSizes:
        """Elements of its messages."""
        received = self.shard.num_elements if self.shard is not None else 0
        return ScatterSizes(_num_elements(self.sends), received)


@dataclass(frozen=True)
class RankBucket:
    """Messages and stacks of one rank in one bucket.

    Args:
        owned: What it orthogonalizes.
        sends: Rows for each other owner.
        receives: Rows from each other source.
        has_gather: Whether any rank of the domain has rows to send. Where none has, as with
            replicas of a whole matrix, all ranks leave the gather out.
        scatters: How results come back.
    """

    owned: OwnedStacks
    sends: Messages
    receives: Messages
    has_gather: bool
    scatters: tuple[RankScatter, ...]

    @property
    def num_elements(self) -> BucketSizes:
        """Elements of its gather and its stacks."""
        return BucketSizes(
            _num_elements(self.sends), _num_elements(self.receives), self.owned.num_elements
        )


@dataclass(frozen=True)
class RankPlan:
    """The part of one rank in a plan: its local matrices, and its share of every bucket.

    Args:
        local: Stacks of local matrices, one by one.
        local_ns: Estimated Newton-Schulz time of each of them.
        buckets: Every bucket of the plan, also those the rank has no part in: it joins all
            collectives.
        order: What of the plan decides the order of a step.
    """

    local: tuple[OwnedStacks, ...]
    local_ns: tuple[int, ...]
    buckets: tuple[RankBucket, ...]
    order: PlanOrder

    @classmethod
    def build(cls, plan: ExchangePlan, rank: int) -> "RankPlan":
        """Return what one rank does of a plan of its domain."""
        local = _local_stacks(plan, rank)
        return cls(
            local=local,
            local_ns=tuple(_stack_ns(plan, owned.stacks[0]) for owned in local),
            buckets=tuple(_rank_bucket(plan, bucket, rank) for bucket in plan.buckets),
            order=plan.order,
        )

    @property
    def scatters(self) -> list[RankScatter]:
        """Scatters of all buckets, in order."""
        return [scatter for bucket in self.buckets for scatter in bucket.scatters]

    def staging(self, dtypes: CommDtypes) -> PlanStaging:
        """Return what the plan stages in a step."""
        return PlanStaging(
            self.order,
            tuple(bucket.num_elements for bucket in self.buckets),
            tuple(scatter.num_elements for scatter in self.scatters),
            max((owned.num_elements for owned in self.local), default=0),
            dtypes,
        )


class LocalStack(NamedTuple):
    """A stack of local matrices.

    Args:
        plan: Position of its plan among those of the rank.
        number: Position in :attr:`RankPlan.local`.
    """

    plan: int
    number: int


@dataclass(frozen=True)
class RankSchedule:
    """The step of one rank.

    Args:
        rank_plans: What the rank does of each plan.
        actions: What it does, in order.
        local: Local matrices to orthogonalize at the beginning of each round, and at the end.
        staging: Memory of messages and stacks.
    """

    rank_plans: tuple[RankPlan, ...]
    actions: tuple[Action, ...]
    local: tuple[tuple[LocalStack, ...], ...]
    staging: StagingLayout

    @classmethod
    def build(cls, plans: Sequence[ExchangePlan], rank: int) -> "RankSchedule":
        """Return what one rank does in a step.

        Args:
            plans: Plans of the domains that the rank is in, in the order in which it has them.
            rank: Rank of the job.
        """
        rank_plans = tuple(RankPlan.build(plan, rank) for plan in plans)
        actions = actions_of([rank_plan.order for rank_plan in rank_plans])
        staging = [
            rank_plan.staging(plan.dtypes)
            for rank_plan, plan in zip(rank_plans, plans, strict=True)
        ]
        return cls(
            rank_plans, actions, _spread_local(rank_plans, actions), StagingLayout.build(staging)
        )


def _spread_local(
    rank_plans: Sequence[RankPlan], actions: Sequence[Action]
) -> tuple[tuple[LocalStack, ...], ...]:
    """Spread local matrices evenly over the rounds and the end, where the last results arrive."""
    num_slots = sum(action.kind == "local" for action in actions)
    slots: list[list[LocalStack]] = [[] for _ in range(num_slots)]
    total_ns = sum(sum(rank_plan.local_ns) for rank_plan in rank_plans)
    before_ns = 0
    for plan, rank_plan in enumerate(rank_plans):
        for number, time_ns in enumerate(rank_plan.local_ns):
            # The slot in which the middle of the stack falls if all slots are equally long; between
            # two of them the first, which fills the time of a gather.
            slot = ((2 * before_ns + time_ns) * num_slots - 1) // max(1, 2 * total_ns)
            slots[min(max(slot, 0), num_slots - 1)].append(LocalStack(plan, number))
            before_ns += time_ns
    return tuple(tuple(stacks) for stacks in slots)


def _num_elements(messages: Messages) -> int:
    return sum(route.num_elements for routes in messages.values() for route in routes)


def _local_stacks(plan: ExchangePlan, rank: int) -> tuple[OwnedStacks, ...]:
    """Return the stacks of local matrices one by one, each with its routes."""
    mine = [index for index in plan.local if plan.owners[index] == (rank,)]
    all_stacks = _owned_stacks(plan, mine, rank)
    of_part: dict[tuple[int, int], list[Route]] = defaultdict(list)
    for route in all_stacks.kept:
        of_part[route.matrix, route.block].append(route)
    return tuple(
        OwnedStacks(
            (stack,), tuple(route for part in stack for route in of_part[part.matrix, part.block])
        )
        for stack in all_stacks.stacks
    )


def _stack_ns(plan: ExchangePlan, stack: Stack) -> int:
    return plan.cost.stack_ns(len(stack), stack[0].num_rows, stack[0].num_cols)


def _owned_stacks(plan: ExchangePlan, indices: Sequence[int], rank: int) -> OwnedStacks:
    kept = [
        route
        for index in indices
        if rank in plan.owners[index]
        for route in plan.routes(index, rank)
        if route.owner == rank
    ]
    return OwnedStacks(tuple(_stacks(plan, indices, rank)), tuple(kept))


def _rank_bucket(plan: ExchangePlan, bucket: Sequence[int], rank: int) -> RankBucket:
    sends: dict[int, list[Route]] = defaultdict(list)
    receives: dict[int, list[Route]] = defaultdict(list)
    # Of each shard that this rank holds or sends results to, by owner.
    results: dict[tuple[int, ...], dict[int, list[Route]]] = defaultdict(lambda: defaultdict(list))
    for index in bucket:
        # Of thousands of ranks most neither hold nor own any of a matrix. With replicas it matters
        # all the same: what others send them decides where this rank's results have room.
        sees_all = plan.order.has_replicas or rank in plan.owners[index]
        if not sees_all and rank not in plan.matrices[index].elements_by_rank:
            continue
        for route in plan.routes(index, None if sees_all else rank):
            # Of several replicas, only one sends its rows.
            if route.source != route.owner:
                if route.owner == rank:
                    receives[route.source].append(route)
                elif route.source == rank:
                    sends[route.owner].append(route)
            # Where other holders are in between, every owner must know what the others send them.
            if len(route.holders) > 1 or ((rank in route.holders) != (route.owner == rank)):
                results[route.holders][route.owner].append(route)
    return RankBucket(
        owned=_owned_stacks(plan, bucket, rank),
        sends=dict(sends),
        receives=dict(receives),
        has_gather=any(
            owner not in region.holders
            for index in bucket
            for region in plan.matrices[index].regions
            for owner in plan.owners[index]
        ),
        scatters=_rank_scatters(plan, results, rank),
    )


def _rank_scatters(
    plan: ExchangePlan,
    results: Mapping[tuple[int, ...], Mapping[int, Sequence[Route]]],
    rank: int,
) -> tuple[RankScatter, ...]:
    """Return the scatters of a bucket; results are evenly distributed over them.

    Args:
        plan: The plan.
        results: Routes by holders and owner.
        rank: This rank.
    """
    count = plan.num_scatters
    sends: list[dict[int, list[Route]]] = [defaultdict(list) for _ in range(count)]
    own: list[RankScatter] = [RankScatter({}, {}, (), None)] * count
    for holders, by_owner in results.items():
        if rank not in holders and rank not in by_owner:
            continue
        elements = {
            owner: sum(route.num_elements for route in routes) for owner, routes in by_owner.items()
        }
        for number, shard in enumerate(scatters_of(holders, elements, count, plan.cost)):
            for share in shard.shares:
                if share.owner == rank:
                    sends[number][share.holder] += routes_of_share(by_owner[rank], share)
            if rank in holders:
                own[number] = _received(shard, by_owner, rank)
    return tuple(
        dataclasses.replace(scatter, sends=dict(sent))
        for scatter, sent in zip(own, sends, strict=True)
    )


def _received(
    shard: ShardScatter, by_owner: Mapping[int, Sequence[Route]], rank: int
) -> RankScatter:
    """Return what a rank gets in a scatter to its shard."""
    arrivals = []
    for share in shard.shares:
        offset = share.offset
        for route in routes_of_share(by_owner[share.owner], share):
            arrivals.append(Arrival(route, offset))
            offset += route.num_elements
    receives = {share.owner: share.num_elements for share in shard.shares if share.holder == rank}
    return RankScatter({}, receives, tuple(arrivals), shard)


def _stacks(plan: ExchangePlan, indices: Sequence[int], rank: int) -> list[Stack]:
    """Group the parts of a rank by shape into stacks; what is not stackable is alone in one."""
    by_shape: dict[tuple[int, int], list[Part]] = defaultdict(list)
    stacks: list[Stack] = []
    for index in indices:
        owners = plan.owners[index]
        if rank not in owners:
            continue
        for block, shape in enumerate(plan.matrices[index].blocks):
            part = parts_of(index, block, shape, owners)[owners.index(rank)]
            if plan.sizes.is_stackable(index):
                by_shape[shape].append(part)
            else:
                stacks.append((part,))
    for shape, parts in by_shape.items():
        rest = iter(parts)
        for size in plan.sizes.stack_sizes(len(parts), shape):
            stacks.append(tuple(itertools.islice(rest, size)))
    # Ranks that share several split blocks must come to them in the same order, and before
    # anything that only some of them have: they all-reduce inside Newton-Schulz.
    stacks.sort(key=lambda stack: (len(stack[0].owners) == 1, stack[0].matrix, stack[0].block))
    return stacks
