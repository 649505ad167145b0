# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The step of one rank over all of its plans: messages, stacks, and their order."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import Ranks
from megatron_muon.plan.routes import Route, ShardScatter, routes_of_share, scatter_to
from megatron_muon.plan.schedule import Action, PlanOrder, actions_of
from megatron_muon.plan.settings import CommDtypes
from megatron_muon.plan.sizes import Stack, num_elements
from megatron_muon.plan.staging import BucketSizes, PlanStaging, StagingLayout

# Routes by the rank at the other end of a message. Both ends list them in plan order.
type Messages = Mapping[int, Sequence[Route]]
type _RoutesByRank = dict[int, list[Route]]


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
        kept: Routes from the rank to itself: their rows are here already.
    """

    stacks: tuple[Stack, ...]
    kept: tuple[Route, ...]

    @property
    def staying(self) -> tuple[Route, ...]:
        """Kept routes without replicas: their results stay too."""
        return tuple(route for route in self.kept if len(route.holders) == 1)

    @property
    def num_elements(self) -> int:
        """Elements of all stacks."""
        return sum(map(num_elements, self.stacks))


@dataclass(frozen=True)
class RankScatter:
    """Results that one rank sends and receives in one bucket.

    Args:
        sends: Results by holder, itself included if others hold the same rows.
        receives: Elements by owner.
        arrivals: Results for its rows, once replicas have passed them on.
        shard: Results for the replicas of its shard; None without results in this bucket.
    """

    sends: Messages
    receives: Mapping[int, int]
    arrivals: tuple[Arrival, ...]
    shard: ShardScatter | None


@dataclass(frozen=True)
class RankBucket:
    """Messages and stacks of one rank in one bucket.

    Args:
        owned: Its stacks.
        sends: Rows by other owner.
        receives: Rows by other source.
        has_gather: Whether any rank of the domain sends rows. Otherwise, as with replicas of whole
            matrices, all ranks leave the gather out.
        scatter: Messages of results.
    """

    owned: OwnedStacks
    sends: Messages
    receives: Messages
    has_gather: bool
    scatter: RankScatter

    @property
    def num_elements(self) -> BucketSizes:
        """Elements of its buffers."""
        return BucketSizes(
            _num_elements(self.sends),
            _num_elements(self.receives),
            self.owned.num_elements,
            _num_elements(self.scatter.sends),
            self.scatter.shard.num_elements if self.scatter.shard is not None else 0,
        )


@dataclass(frozen=True)
class RankPlan:
    """Share of one rank in a plan: local matrices, and messages and stacks of every bucket.

    Args:
        local: Stacks of local matrices, one by one.
        buckets: All buckets of the plan, as the rank joins all collectives.
        order: Numbers of the plan that decide the order of a step.
    """

    local: tuple[OwnedStacks, ...]
    buckets: tuple[RankBucket, ...]
    order: PlanOrder

    @classmethod
    def build(cls, plan: ExchangePlan, rank: int) -> "RankPlan":
        """Return the share of one rank in a plan of its domain."""
        local = [index for index in plan.local if plan.owners[index] == (rank,)]
        return cls(
            local=tuple(_owned(plan, [stack], rank) for stack in plan.sizes.stacks(local)[rank]),
            buckets=tuple(_rank_bucket(plan, bucket, rank) for bucket in plan.buckets),
            order=plan.order,
        )

    def staging(self, dtypes: CommDtypes) -> PlanStaging:
        """Return the staging memory of the plan."""
        return PlanStaging(
            self.order,
            tuple(bucket.num_elements for bucket in self.buckets),
            max((owned.num_elements for owned in self.local), default=0),
            dtypes,
        )


class LocalStack(NamedTuple):
    """A stack of local matrices.

    Args:
        plan: Position of its plan in the list of the rank.
        number: Position in ``RankPlan.local``.
    """

    plan: int
    number: int


@dataclass(frozen=True)
class RankSchedule:
    """The step of one rank.

    Args:
        rank_plans: Share of the rank, by plan.
        actions: Actions of the step, in order.
        local: Local matrices to orthogonalize at the beginning of every round, and at the end.
        staging: Memory of messages and stacks.
    """

    rank_plans: tuple[RankPlan, ...]
    actions: tuple[Action, ...]
    local: tuple[tuple[LocalStack, ...], ...]
    staging: StagingLayout

    @classmethod
    def build(cls, plans: Sequence[ExchangePlan], rank: int) -> "RankSchedule":
        """Return the step of one rank, with the plans of its domains in their order."""
        rank_plans = tuple(RankPlan.build(plan, rank) for plan in plans)
        actions = actions_of(tuple(rank_plan.order for rank_plan in rank_plans))
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
    """Spread local matrices evenly over the rounds and the end of the step."""
    stacks = [
        LocalStack(plan, number)
        for plan, rank_plan in enumerate(rank_plans)
        for number, _ in enumerate(rank_plan.local)
    ]
    num_slots = sum(action.kind == "local" for action in actions)
    # Rounded up: the first slots fill the time of a gather, and come before the others.
    ends = [-(-len(stacks) * slot // num_slots) for slot in range(num_slots + 1)]
    return tuple(tuple(stacks[start:end]) for start, end in itertools.pairwise(ends))


def _num_elements(messages: Messages) -> int:
    return sum(route.num_elements for routes in messages.values() for route in routes)


def _owned(plan: ExchangePlan, stacks: Sequence[Stack], rank: int) -> OwnedStacks:
    """Return stacks with the routes of their parts that stay on the rank."""
    kept = [
        route
        for stack in stacks
        for part in stack
        for route in plan.routes(part.matrix, rank)
        if (route.block, route.owner) == (part.block, rank)
    ]
    return OwnedStacks(tuple(stacks), tuple(kept))


def _rank_bucket(plan: ExchangePlan, bucket: Sequence[int], rank: int) -> RankBucket:
    sends: _RoutesByRank = defaultdict(list)
    receives: _RoutesByRank = defaultdict(list)
    # Routes of results, by holders of a shard and by owner.
    results: dict[Ranks, _RoutesByRank] = defaultdict(lambda: defaultdict(list))
    for index in bucket:
        # Most of thousands of ranks neither hold nor own a matrix. With replicas, their messages
        # decide where this rank's results have room.
        sees_all = plan.order.has_replicas or rank in plan.owners[index]
        if not sees_all and rank not in plan.matrices[index].elements_by_rank:
            continue
        for route in plan.routes(index, None if sees_all else rank):
            # Only one of several replicas sends its rows.
            if route.source != route.owner:
                if route.owner == rank:
                    receives[route.source].append(route)
                elif route.source == rank:
                    sends[route.owner].append(route)
            # Owners fill the sections of several replicas together: all must know all results.
            if len(route.holders) > 1 or ((rank in route.holders) != (route.owner == rank)):
                results[route.holders][route.owner].append(route)
    owned = [index for index in bucket if rank in plan.owners[index]]
    return RankBucket(
        owned=_owned(plan, plan.sizes.stacks(owned)[rank], rank),
        sends=dict(sends),
        receives=dict(receives),
        has_gather=any(
            owner not in region.holders
            for index in bucket
            for region in plan.matrices[index].regions
            for owner in plan.owners[index]
        ),
        scatter=_rank_scatter(plan, results, rank),
    )


def _rank_scatter(plan: ExchangePlan, results: Mapping[Ranks, Messages], rank: int) -> RankScatter:
    sends: _RoutesByRank = defaultdict(list)
    receives: dict[int, int] = {}
    arrivals: list[Arrival] = []
    own_shard = None
    for holders, by_owner in results.items():
        if rank not in holders and rank not in by_owner:
            continue
        elements = {
            owner: sum(route.num_elements for route in routes) for owner, routes in by_owner.items()
        }
        shard = scatter_to(holders, elements, plan.cost)
        own_shard = shard if rank in holders else own_shard
        for share in shard.shares:
            if rank not in (share.owner, *holders):
                continue
            routes = list(routes_of_share(by_owner[share.owner], share))
            if share.owner == rank:
                sends[share.holder] += routes
            if share.holder == rank:
                receives[share.owner] = share.num_elements
            if rank in holders:
                ends = itertools.accumulate((r.num_elements for r in routes), initial=share.offset)
                arrivals += map(Arrival, routes, ends)
    return RankScatter(dict(sends), receives, tuple(arrivals), own_shard)
