# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What one rank sends, receives and orthogonalizes, in which order."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Part, Route, parts_of
from megatron_muon.plan.scatter import ShardScatter, routes_of_share, scatters_of
from megatron_muon.plan.schedule import PlanOrder
from megatron_muon.plan.staging import BucketSizes, PlanStaging, ScatterSizes
from megatron_muon.plan.wire import Wire

type Stack = tuple[Part, ...]
# The routes of a message, by the rank at its other end. Both ends list them in plan order.
type Messages = Mapping[int, Sequence[Route]]


class Arrival(NamedTuple):
    """Results for this rank's rows, and where they lie.

    Args:
        route: The rectangle, whole or a part of one.
        offset: Its first element in the memory of the scatter.
    """

    route: Route
    offset: int


@dataclass(frozen=True)
class OwnedStacks:
    """What one rank orthogonalizes at once.

    Args:
        stacks: Stacks of parts of one shape each.
        rooms: Matrices that each stack has room for; more than it has parts where it is padded.
        kept: Routes of which it is owner and holder: they need not travel.
    """

    stacks: tuple[Stack, ...]
    rooms: tuple[int, ...]
    kept: tuple[Route, ...]

    @property
    def staying(self) -> tuple[Route, ...]:
        """Kept routes whose results stay too: with replicas they come back with all others."""
        return tuple(route for route in self.kept if len(route.holders) == 1)

    @property
    def num_elements(self) -> int:
        """Elements of all stacks, padding included."""
        return sum(
            room * stack[0].num_rows * stack[0].num_cols
            for stack, room in zip(self.stacks, self.rooms, strict=True)
        )


@dataclass(frozen=True)
class RankScatter:
    """What one rank does in one scatter.

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


class RankGather(NamedTuple):
    """What one rank does in one gather.

    Args:
        sends: Rows for each other owner; for this rank too where they arrive in place.
        receives: Rows from each other source; from this rank too where they arrive in place.
    """

    sends: Messages
    receives: Messages

    @property
    def num_sent(self) -> int:
        """Elements of all sent messages."""
        return _num_elements(self.sends)

    @property
    def num_received(self) -> int:
        """Elements of all received messages."""
        return _num_elements(self.receives)


@dataclass(frozen=True)
class RankBucket:
    """What one rank does in one bucket.

    Args:
        owned: What it orthogonalizes.
        gathers: How rows come to owners; several where the bucket is portioned.
        is_in_place: Whether what arrives, in the order of its sources, is the one part that the
            rank owns: the memory that it is received in is the stack.
        has_gather: Whether any rank of the domain has rows to send. Where none has, as with
            replicas of a whole matrix, all ranks leave the gather out.
        scatters: How results come back.
    """

    owned: OwnedStacks
    gathers: tuple[RankGather, ...]
    is_in_place: bool
    has_gather: bool
    scatters: tuple[RankScatter, ...]

    @property
    def num_elements(self) -> BucketSizes:
        """Elements of its gathers and its stacks."""
        return BucketSizes(
            gather_send=sum(gather.num_sent for gather in self.gathers),
            gather_receive=sum(gather.num_received for gather in self.gathers),
            stacks=0 if self.is_in_place else self.owned.num_elements,
        )


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: its local matrices, and its share of every bucket.

    Args:
        local: Stacks of local matrices, one by one.
        local_load_s: Newton-Schulz seconds of each of them.
        buckets: Every bucket of the plan, also those the rank has no part in: it joins all
            collectives.
        bucket_load_s: Newton-Schulz seconds of what the rank owns of each bucket.
        order: What of the plan decides the order of a step.
    """

    local: tuple[OwnedStacks, ...]
    local_load_s: tuple[float, ...]
    buckets: tuple[RankBucket, ...]
    bucket_load_s: tuple[float, ...]
    order: PlanOrder

    @classmethod
    def build(cls, plan: ExchangePlan, rank: int) -> "RankPlan":
        """Work out what one rank does.

        Args:
            plan: The plan of its domain.
            rank: Rank of the job.
        """
        local = _local_stacks(plan, rank)
        return cls(
            local=local,
            local_load_s=tuple(_stack_seconds(plan, owned.stacks[0]) for owned in local),
            buckets=tuple(_rank_bucket(plan, bucket, rank) for bucket in plan.buckets),
            bucket_load_s=tuple(bucket.load_s.get(rank, 0.0) for bucket in plan.seconds),
            order=plan.order,
        )

    @property
    def scatters(self) -> list[RankScatter]:
        """Scatters of all buckets, in order."""
        return [scatter for bucket in self.buckets for scatter in bucket.scatters]

    def staging(self, wire: Wire) -> PlanStaging:
        """Return what the plan stages in a step, in bytes."""
        return PlanStaging(
            self.order,
            [bucket.num_elements.in_bytes(wire) for bucket in self.buckets],
            [scatter.num_elements.in_bytes(wire) for scatter in self.scatters],
            max((owned.num_elements for owned in self.local), default=0) * wire.gather_bytes,
        )

    def num_results(self) -> Counter[int]:
        """Count how many pieces the results for this rank's rows arrive in, by matrix."""
        owned = [*self.local, *(bucket.owned for bucket in self.buckets)]
        counts = Counter(route.matrix for each in owned for route in each.staying)
        counts.update(each.route.matrix for scatter in self.scatters for each in scatter.arrivals)
        return counts


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
            (stack,),
            (room,),
            tuple(route for part in stack for route in of_part[part.matrix, part.block]),
        )
        for stack, room in zip(all_stacks.stacks, all_stacks.rooms, strict=True)
    )


def _stack_seconds(plan: ExchangePlan, stack: Stack) -> float:
    part = stack[0]
    return len(stack) * plan.cost.newton_schulz_seconds(part.num_rows, part.num_cols)


def _owned_stacks(plan: ExchangePlan, indices: Sequence[int], rank: int) -> OwnedStacks:
    kept = [
        route
        for index in indices
        if rank in plan.owners[index]
        for route in plan.routes(index)
        if route.owner == rank and rank in route.holders
    ]
    stacks = _stacks(plan, indices, rank)
    return OwnedStacks(
        tuple(stack for stack, _ in stacks), tuple(room for _, room in stacks), tuple(kept)
    )


def _rank_bucket(plan: ExchangePlan, bucket: Sequence[int], rank: int) -> RankBucket:
    count = plan.order.num_gathers
    sends: list[dict[int, list[Route]]] = [defaultdict(list) for _ in range(count)]
    receives: list[dict[int, list[Route]]] = [defaultdict(list) for _ in range(count)]
    # Of each shard that this rank holds or sends results to, by owner.
    results: dict[tuple[int, ...], dict[int, list[Route]]] = defaultdict(lambda: defaultdict(list))
    own_rows: list[Route] = []
    for index in bucket:
        # Of thousands of ranks most neither hold nor own any of a matrix. With replicas it matters
        # all the same: what others send them decides where this rank's results have room.
        sees_all = plan.order.has_replicas or rank in plan.owners[index]
        if not sees_all and rank not in plan.matrices[index].elements_by_rank:
            continue
        for route in plan.routes(index, None if sees_all else rank):
            is_holder = rank in route.holders
            if route.owner == route.source == rank:
                own_rows.append(route)
            elif route.owner == rank:
                receives[route.portion][route.source].append(route)
            # Of several replicas, only one sends its rows.
            elif route.source == rank:
                sends[route.portion][route.owner].append(route)
            # Where other holders are in between, each owner must know what the others send them.
            if len(route.holders) > 1 or (is_holder != (route.owner == rank)):
                results[route.holders][route.owner].append(route)
    in_place = plan.stacking.arriving_in_place(bucket, is_portioned=plan.order.is_portioned)
    is_in_place = any(receives) and rank in in_place
    if is_in_place:
        # A message like others: they lie between the rows of lower and of higher ranks.
        for route in own_rows:
            sends[route.portion][rank].append(route)
            receives[route.portion][rank].append(route)
    return RankBucket(
        owned=_owned_stacks(plan, bucket, rank),
        gathers=tuple(
            RankGather(dict(sent), dict(received))
            for sent, received in zip(sends, receives, strict=True)
        ),
        is_in_place=is_in_place,
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
    """Return the scatters of a bucket.

    Args:
        plan: The plan.
        results: Routes by holders and owner.
        rank: This rank.
    """
    if not plan.order.is_portioned:
        return _even_scatters(plan, results, rank, plan.num_scatters)
    # What has arrived together leaves together.
    portions = (
        {
            holders: {
                owner: [route for route in routes if route.portion == number]
                for owner, routes in by_owner.items()
            }
            for holders, by_owner in results.items()
        }
        for number in range(plan.num_scatters)
    )
    return tuple(scatter for each in portions for scatter in _even_scatters(plan, each, rank, 1))


def _even_scatters(
    plan: ExchangePlan,
    results: Mapping[tuple[int, ...], Mapping[int, Sequence[Route]]],
    rank: int,
    count: int,
) -> tuple[RankScatter, ...]:
    """Share results out to so many scatters, evenly; arguments as for :func:`_rank_scatters`."""
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
        dataclasses.replace(each, sends=dict(sent)) for each, sent in zip(own, sends, strict=True)
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
    receives = {each.owner: each.num_elements for each in shard.shares if each.holder == rank}
    return RankScatter({}, receives, tuple(arrivals), shard)


def _stacks(plan: ExchangePlan, indices: Sequence[int], rank: int) -> list[tuple[Stack, int]]:
    """Group the parts of a rank by shape into stacks, with the matrices each has room for.

    What is not stackable stands alone.
    """
    by_shape: dict[tuple[int, int], list[Part]] = defaultdict(list)
    stacks: list[tuple[Stack, int]] = []
    for index in indices:
        owners = plan.owners[index]
        if rank not in owners:
            continue
        for block, shape in enumerate(plan.matrices[index].blocks):
            part = parts_of(index, block, shape, owners)[owners.index(rank)]
            if not plan.stacking.is_stackable(index):
                stacks.append(((part,), 1))
            else:
                by_shape[shape].append(part)
    for shape, parts in by_shape.items():
        first = 0
        for room in plan.stacking.rooms(len(parts), shape, is_stacked=True):
            stacks.append((tuple(parts[first : first + room]), room))
            first += room
    # Ranks that share several split blocks must come to them in the same order, and before
    # anything that only some of them have: they all-reduce inside Newton-Schulz.
    stacks.sort(key=lambda item: (len(item[0][0].owners) == 1, item[0][0].matrix, item[0][0].block))
    return stacks
