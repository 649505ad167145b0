# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What one rank sends, receives and orthogonalizes, in which order."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Part, Route, parts_of

type Stack = tuple[Part, ...]
# The routes of a message, by the rank at its other end. Both ends list them in plan order.
type Messages = Mapping[int, Sequence[Route]]


@dataclass(frozen=True)
class OwnedStacks:
    """What one rank orthogonalizes at once.

    Args:
        stacks: Stacks of parts of one shape each.
        kept: Routes of which it is owner and holder: they need not travel.
    """

    stacks: tuple[Stack, ...]
    kept: tuple[Route, ...]


@dataclass(frozen=True)
class RankBucket:
    """What one rank does in one bucket.

    Args:
        owned: What it orthogonalizes.
        gather_sends: Rows for each other owner.
        gather_receives: Rows from each other source.
        scatter_sends: Results for each other holder.
        scatter_receives: Results from each other owner.
        has_gather: Whether any rank of the domain has rows to send. Where none has, as with
            replicas of a whole matrix, all ranks leave the gather out.
    """

    owned: OwnedStacks
    gather_sends: Messages
    gather_receives: Messages
    scatter_sends: Messages
    scatter_receives: Messages
    has_gather: bool


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: its local matrices, and its share of every bucket.

    Args:
        local: Groups of local matrices to orthogonalize before each bucket, while its rows travel;
            one entry where there are no buckets.
        buckets: Every bucket of the plan, also those the rank has no part in: it joins all
            collectives.
    """

    local: tuple[tuple[OwnedStacks, ...], ...]
    buckets: tuple[RankBucket, ...]

    @classmethod
    def build(cls, plan: ExchangePlan, rank: int) -> "RankPlan":
        """Work out what one rank does.

        Args:
            plan: The plan of its domain.
            rank: Rank of the job.
        """
        return cls(
            local=tuple(
                tuple(_owned_stacks(plan, group, rank) for group in groups)
                for groups in _local_groups(plan, rank)
            ),
            buckets=tuple(_rank_bucket(plan, bucket, rank) for bucket in plan.buckets),
        )


def _local_groups(plan: ExchangePlan, rank: int) -> list[list[list[int]]]:
    """Deal local matrices out to the buckets in which the rank has the least to do.

    Returns:
        For each bucket, or a single one where there is none, groups of matrices. A group is as
        large as a bucket may be: stacks of one group after the other lie in the same memory.
    """
    mine = [index for index in plan.local if plan.owners[index] == (rank,)]
    load_s = [
        sum(plan.matrix_load_s[index] for index in bucket if rank in plan.owners[index])
        for bucket in plan.buckets
    ] or [0.0]
    dealt: list[list[int]] = [[] for _ in load_s]
    for index in sorted(mine, key=lambda i: (-plan.matrix_load_s[i], i)):
        # Longest first, always to the quietest bucket: the usual greedy rule for even loads.
        quietest = min(range(len(load_s)), key=lambda number: (load_s[number], number))
        load_s[quietest] += plan.matrix_load_s[index]
        dealt[quietest].append(index)
    return [_grouped(plan, sorted(indices)) for indices in dealt]


def _grouped(plan: ExchangePlan, indices: Sequence[int]) -> list[list[int]]:
    """Split a list of matrices into groups of at most ``max_numel`` elements."""
    groups: list[list[int]] = []
    # Starts full, so that the first matrix opens the first group.
    elements = plan.max_numel
    for index in indices:
        elements += plan.matrices[index].num_elements
        if elements > plan.max_numel:
            groups.append([])
            elements = plan.matrices[index].num_elements
        groups[-1].append(index)
    return groups


def _owned_stacks(plan: ExchangePlan, indices: Sequence[int], rank: int) -> OwnedStacks:
    kept = [
        route
        for index in indices
        if rank in plan.owners[index]
        for route in plan.routes(index)
        if route.owner == rank and rank in route.holders
    ]
    return OwnedStacks(_stacks(plan, indices, rank), tuple(kept))


def _rank_bucket(plan: ExchangePlan, bucket: Sequence[int], rank: int) -> RankBucket:
    gather_sends: dict[int, list[Route]] = defaultdict(list)
    gather_receives: dict[int, list[Route]] = defaultdict(list)
    scatter_sends: dict[int, list[Route]] = defaultdict(list)
    scatter_receives: dict[int, list[Route]] = defaultdict(list)
    for index in bucket:
        # Without joining, each tensor-parallel rank has a matrix of its own; others neither hold
        # nor own any of it.
        if rank not in plan.matrices[index].ranks:
            continue
        for route in plan.routes(index):
            is_holder = rank in route.holders
            if route.owner == rank:
                if route.source != rank:
                    gather_receives[route.source].append(route)
                # Also where the owner holds all rows itself: replicas need the result.
                for holder in route.holders:
                    if holder != rank:
                        scatter_sends[holder].append(route)
            elif is_holder:
                scatter_receives[route.owner].append(route)
                # Every replica gets the result, but only one of them sends its rows.
                if route.source == rank:
                    gather_sends[route.owner].append(route)
    return RankBucket(
        owned=_owned_stacks(plan, bucket, rank),
        gather_sends=dict(gather_sends),
        gather_receives=dict(gather_receives),
        scatter_sends=dict(scatter_sends),
        scatter_receives=dict(scatter_receives),
        has_gather=any(
            owner not in region.holders
            for index in bucket
            for region in plan.matrices[index].regions
            for owner in plan.owners[index]
        ),
    )


def _stacks(plan: ExchangePlan, indices: Sequence[int], rank: int) -> tuple[Stack, ...]:
    """Group the parts of a rank by shape; a part of a split block stands alone."""
    by_shape: dict[tuple[int, int], list[Part]] = defaultdict(list)
    stacks: list[Stack] = []
    for index in indices:
        owners = plan.owners[index]
        if rank not in owners:
            continue
        for block, shape in enumerate(plan.matrices[index].blocks):
            part = parts_of(index, block, shape, owners)[owners.index(rank)]
            # Its all-reduces are between the owners of this block: batching it with another block
            # would need the same owners, in the same stack, on all of them.
            if len(owners) > 1:
                stacks.append((part,))
            else:
                by_shape[shape].append(part)
    for shape, parts in by_shape.items():
        size = plan.cost.stack_size(*shape)
        stacks += [tuple(parts[first : first + size]) for first in range(0, len(parts), size)]
    # Ranks that share several split blocks must come to them in the same order, and before
    # anything that only some of them have: they all-reduce inside Newton-Schulz.
    stacks.sort(key=lambda stack: (len(stack[0].owners) == 1, stack[0].matrix, stack[0].block))
    return tuple(stacks)
