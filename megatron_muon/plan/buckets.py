# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices travel together.

Buckets are slices of time: what a rank owns is dealt out longest first, so that each bucket holds
about the same share of its time. There are as many buckets as memory asks for, or more where the
step is then estimated to be shorter. As many of them are under way as memory allows.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in each bucket most ranks would wait for the few that own some
(:mod:`megatron_muon.plan.step_estimate`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_muon.plan.assignment import matrix_seconds
from megatron_muon.plan.cost import CostModel, HeldElements
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.schedule import Depth
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds, step_seconds
from megatron_muon.plan.wire import Wire

# Numbers of buckets to try, besides the fewest that memory allows. One bucket overlaps nothing;
# with many, ranks wait for each other more often than they hide traffic.
_NUM_BUCKETS = (1, 2, 4, 8, 16)
# Depths to try. The first that fits into memory is taken: the deeper, the less a rank waits for
# others. The last one takes the least, and is taken in any case.
_DEPTHS = (*(Depth(each, each) for each in (16, 8, 4, 2)), Depth(1, 2), Depth(2, 1), Depth(1, 1))
# Ranks whose memory is looked at: those with most to stage over all buckets.
_NUM_FULLEST = 16


@dataclass(frozen=True)
class TravellingMatrix:
    """A matrix of which rows travel.

    Args:
        index: Index in the plan.
        layout: Its layout.
        owners: Its owners.
        load_s: Newton-Schulz seconds on each owner.
        staged_elements: What an owner has in its buffers of it: its part, or what it sends back
            where replicas get a copy each.
        gather_s: Seconds of its rows over the link of each owner.
        scatter_s: Seconds of its results over the link of each owner.
    """

    index: int
    layout: MatrixLayout
    owners: tuple[int, ...]
    load_s: float
    staged_elements: int
    gather_s: Mapping[int, float]
    scatter_s: Mapping[int, float]

    @classmethod
    def of(
        cls, index: int, layout: MatrixLayout, owners: tuple[int, ...], cost: CostModel, wire: Wire
    ) -> "TravellingMatrix":
        """Work out what a matrix costs its owners."""
        # Results are staged once for each replica that they are sent to.
        with_replicas = sum(layout.elements_by_rank.values())
        load_s = matrix_seconds(layout, cost, len(owners))
        gather_s, scatter_s = _traffic_seconds(index, layout, owners, cost, wire)
        staged = -(-with_replicas // len(owners))
        return cls(index, layout, owners, load_s, staged, gather_s, scatter_s)


def _traffic_seconds(
    index: int, layout: MatrixLayout, owners: tuple[int, ...], cost: CostModel, wire: Wire
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds of a matrix over the link of each owner: of its rows, of its results."""
    gather_s, scatter_s = dict.fromkeys(owners, 0.0), dict.fromkeys(owners, 0.0)
    held = layout.elements_by_rank
    if sum(held.values()) == layout.num_elements:
        elements = HeldElements(held, cost)
        for owner in owners:
            # Every owner has an equal part of each holder's rows, or nearly.
            one_byte_s = elements.one_byte_seconds(owner) / len(owners)
            gather_s[owner] = wire.gather_bytes * one_byte_s
            scatter_s[owner] = wire.scatter_bytes * one_byte_s
        return gather_s, scatter_s
    # Of replicas the nearest sends and all receive: the two ways differ by more than their bytes.
    for transfer in transfers_of(index, layout, owners, cost):
        byte_s = cost.seconds_per_byte(transfer.holder, transfer.owner)
        gather_s[transfer.owner] += transfer.gathered * wire.gather_bytes * byte_s
        scatter_s[transfer.owner] += transfer.scattered * wire.scatter_bytes * byte_s
    return gather_s, scatter_s


@dataclass
class _BucketDraft:
    """A bucket that is being filled."""

    matrices: list[TravellingMatrix] = field(default_factory=list)
    load_s: dict[int, float] = field(default_factory=dict)  # by rank
    staged_elements: dict[int, int] = field(default_factory=dict)  # by rank

    def load_of(self, owners: Sequence[int]) -> float:
        """Return the load of the busiest of some ranks."""
        return max([self.load_s.get(owner, 0.0) for owner in owners])

    def has_room(self, matrix: TravellingMatrix, max_numel: int) -> bool:
        """Return whether a matrix fits into the buffers of all its owners."""
        filled = max([self.staged_elements.get(owner, 0) for owner in matrix.owners])
        return filled + matrix.staged_elements <= max_numel

    def seconds(self) -> BucketSeconds:
        """Add up what its matrices take on each rank."""
        gather_s: dict[int, float] = defaultdict(float)
        scatter_s: dict[int, float] = defaultdict(float)
        # In parameter order: sums of floats depend on it, and plans are compared across versions.
        for matrix in sorted(self.matrices, key=lambda matrix: matrix.index):
            for owner in matrix.owners:
                gather_s[owner] += matrix.gather_s[owner]
                scatter_s[owner] += matrix.scatter_s[owner]
        return BucketSeconds(self.load_s, dict(gather_s), dict(scatter_s))

    def add(self, matrix: TravellingMatrix) -> None:
        """Put a matrix in."""
        self.matrices.append(matrix)
        for owner in matrix.owners:
            self.load_s[owner] = self.load_s.get(owner, 0.0) + matrix.load_s
            staged = self.staged_elements.get(owner, 0)
            self.staged_elements[owner] = staged + matrix.staged_elements


@dataclass(frozen=True)
class Buckets:
    """The buckets of a plan.

    Args:
        matrices: Indices of the matrices of each bucket, ascending.
        seconds: What each takes.
        depth: How many are under way.
        step_s: Estimated seconds of a step.
        bound_s: Seconds that a step takes at least with these owners, whatever the buckets are.
    """

    matrices: list[list[int]]
    seconds: tuple[BucketSeconds, ...]
    depth: Depth
    step_s: float
    bound_s: float


def choose_buckets(
    travelling: Sequence[TravellingMatrix],
    ranks: Sequence[int],
    local_load_s: Mapping[int, float],
    wire: Wire,
    *,
    max_numel: int,
    staging_bytes: int,
) -> Buckets:
    """Deal matrices out to the number of buckets with the shortest step.

    Args:
        travelling: Matrices of which rows travel.
        ranks: Ranks of the domain.
        local_load_s: Newton-Schulz seconds by rank of what needs no other rank.
        wire: Bytes an element takes.
        max_numel: Most elements that a rank may stage in one bucket.
        staging_bytes: Memory of a rank up to which more buckets are under way.
    """
    bound_s = _bound_seconds(travelling, local_load_s)
    if not travelling:
        return Buckets([], (), Depth(1, 1), bound_s, bound_s)
    staged: dict[int, int] = defaultdict(int)
    for matrix in travelling:
        for owner in matrix.owners:
            staged[owner] += matrix.staged_elements
    # A lower bound: the rank with most to stage needs at least so many.
    fewest = max(-(-elements // max_numel) for elements in staged.values())
    fullest = _fullest_ranks(travelling, staged)
    # Longest first: the short ones then even out what the long ones left uneven.
    longest_first = sorted(travelling, key=lambda matrix: (-matrix.load_s, matrix.index))
    found = []
    for num_buckets in sorted({fewest, *(max(fewest, number) for number in _NUM_BUCKETS)}):
        drafts = _deal(longest_first, num_buckets, max_numel)
        depth = _deepest(drafts, fullest, wire, staging_bytes)
        seconds = tuple(draft.seconds() for draft in drafts)
        step_s = max(step_seconds([PlanSeconds(ranks, seconds, depth)], local_load_s).values())
        indices = [sorted(matrix.index for matrix in draft.matrices) for draft in drafts]
        found.append(Buckets(indices, seconds, depth, step_s, bound_s))
    # Of equal ones the one with the fewest buckets.
    return min(found, key=lambda buckets: buckets.step_s)


def _bound_seconds(
    travelling: Sequence[TravellingMatrix], local_load_s: Mapping[int, float]
) -> float:
    """Return the time that no schedule of these owners can beat.

    A rank works from when its first rows have arrived until it sends its last results. Only what
    needs no other rank can hide that.
    """
    work_s = dict.fromkeys(local_load_s, 0.0)
    shortest_s: dict[int, tuple[float, float]] = {}
    for matrix in travelling:
        for owner in matrix.owners:
            work_s[owner] += matrix.load_s
            gather_s, scatter_s = shortest_s.get(owner, (math.inf, math.inf))
            shortest_s[owner] = (
                min(gather_s, matrix.gather_s[owner]),
                min(scatter_s, matrix.scatter_s[owner]),
            )
    return max(
        (
            seconds + max(local_load_s[rank], sum(shortest_s.get(rank, ())))
            for rank, seconds in work_s.items()
        ),
        default=0.0,
    )


def _fullest_ranks(travelling: Sequence[TravellingMatrix], staged: Mapping[int, int]) -> list[int]:
    """Return the ranks that stage most over all buckets, as owners and as holders."""
    total = Counter(staged)
    for matrix in travelling:
        total.update(matrix.layout.elements_by_rank)
    return sorted(total, key=lambda rank: (-total[rank], rank))[:_NUM_FULLEST]


def _deepest(
    drafts: Sequence[_BucketDraft], ranks: Sequence[int], wire: Wire, staging_bytes: int
) -> Depth:
    """Return the first depth whose messages and stacks fit into the memory of some ranks.

    The sum is approximate: it leaves out alignment, padding of stacks and gaps between buffers.
    """
    row_bytes, result_bytes = wire.gather_bytes, wire.scatter_bytes
    # By rank and bucket: what it holds of it, and what it owns of it.
    held = [
        [sum(m.layout.elements_by_rank.get(rank, 0) for m in draft.matrices) for draft in drafts]
        for rank in ranks
    ]
    owned = [[draft.staged_elements.get(rank, 0) for draft in drafts] for rank in ranks]
    for deepest in _DEPTHS:
        depth = Depth(*(min(each, len(drafts)) for each in deepest))
        most = 0
        for of_holder, of_owner in zip(held, owned, strict=True):
            # Rows leave its shard and arrive at its stacks; results go the other way.
            messages = [sum(pair) for pair in zip(of_holder, of_owner, strict=True)]
            for index, in_work in enumerate(of_owner):
                gathers = sum(messages[index + 1 : index + 1 + depth.ahead]) + 2 * in_work
                scatters = sum(messages[max(0, index - depth.behind) : index])
                most = max(most, gathers * row_bytes + scatters * result_bytes)
        if most <= staging_bytes:
            break
    return depth


def _deal(
    longest_first: Sequence[TravellingMatrix], num_buckets: int, max_numel: int
) -> list[_BucketDraft]:
    """Put each matrix into the bucket in which its owners have the least to do.

    A bucket more is opened where a matrix fits into none: rooms of several owners may not coincide.
    Buckets that stay empty are left out.
    """
    drafts = [_BucketDraft() for _ in range(num_buckets)]
    for matrix in longest_first:
        with_room = [draft for draft in drafts if draft.has_room(matrix, max_numel)]
        if not with_room:
            drafts.append(_BucketDraft())
            with_room = drafts[-1:]
        # The first of equal ones, so that every rank finds the same.
        min(with_room, key=lambda draft: draft.load_of(matrix.owners)).add(matrix)
    return [draft for draft in drafts if draft.matrices]
