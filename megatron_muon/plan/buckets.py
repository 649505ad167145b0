# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices travel together.

Buckets are slices of time: what a rank owns is dealt out longest first, so that each bucket holds
about the same share of its time. There are as many buckets as memory asks for, or more where the
pipeline is then estimated to be shorter.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in each bucket most ranks would wait for the few that own some
(:func:`~megatron_muon.plan.pipeline_estimate.pipeline_seconds`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_muon.plan.assignment import matrix_seconds
from megatron_muon.plan.cost import CostModel, HeldElements
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.pipeline_estimate import pipeline_seconds
from megatron_muon.plan.wire import Wire

# Numbers of buckets to try, besides the fewest that memory allows. One bucket overlaps nothing;
# with many, ranks wait for each other more often than they hide traffic. Trying 16 and 32 too
# changed none of seven plans in docs/performance.md.
_NUM_BUCKETS = (1, 2, 4, 8)


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
    """

    index: int
    layout: MatrixLayout
    owners: tuple[int, ...]
    load_s: float
    staged_elements: int

    @classmethod
    def of(
        cls, index: int, layout: MatrixLayout, owners: tuple[int, ...], cost: CostModel
    ) -> "TravellingMatrix":
        """Work out what a matrix costs its owners."""
        # Results are staged once for each replica that they are sent to.
        with_replicas = sum(layout.elements_by_rank.values())
        load_s = matrix_seconds(layout, cost, len(owners))
        return cls(index, layout, owners, load_s, -(-with_replicas // len(owners)))


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

    def add(self, matrix: TravellingMatrix) -> None:
        """Put a matrix in."""
        self.matrices.append(matrix)
        for owner in matrix.owners:
            self.load_s[owner] = self.load_s.get(owner, 0.0) + matrix.load_s
            staged = self.staged_elements.get(owner, 0)
            self.staged_elements[owner] = staged + matrix.staged_elements


def choose_buckets(
    travelling: Sequence[TravellingMatrix],
    local_load_s: Mapping[int, float],
    cost: CostModel,
    wire: Wire,
    *,
    max_numel: int,
) -> tuple[list[list[int]], float]:
    """Deal matrices out to the number of buckets with the shortest pipeline.

    Args:
        travelling: Matrices of which rows travel.
        local_load_s: Newton-Schulz seconds of local matrices by rank.
        cost: Rates of the machine.
        wire: Bytes an element takes.
        max_numel: Most elements that a rank may stage in one bucket.

    Returns:
        Indices of the matrices of each bucket, ascending, and the estimated seconds of a step.
    """
    if not travelling:
        return [], pipeline_seconds([], local_load_s, [])
    staged: dict[int, int] = defaultdict(int)
    for matrix in travelling:
        for owner in matrix.owners:
            staged[owner] += matrix.staged_elements
    # A lower bound: the rank with most to stage needs at least so many.
    fewest = max(-(-elements // max_numel) for elements in staged.values())
    # Longest first: the short ones then even out what the long ones left uneven.
    longest_first = sorted(travelling, key=lambda matrix: (-matrix.load_s, matrix.index))
    found = []
    for num_buckets in sorted({fewest, *(max(fewest, number) for number in _NUM_BUCKETS)}):
        drafts = _deal(longest_first, num_buckets, max_numel)
        seconds = pipeline_seconds(
            [draft.load_s for draft in drafts],
            local_load_s,
            [_traffic_seconds(draft, cost, wire) for draft in drafts],
        )
        buckets = [sorted(matrix.index for matrix in draft.matrices) for draft in drafts]
        found.append((seconds, num_buckets, buckets))
    seconds, _, buckets = min(found)
    return buckets, seconds


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


def _traffic_seconds(bucket: _BucketDraft, cost: CostModel, wire: Wire) -> float:
    """Estimate the time of a bucket's messages over the busiest owner's link, one way."""
    seconds: dict[int, float] = defaultdict(float)
    # In parameter order: sums of floats depend on it, and plans are compared across versions.
    for matrix in sorted(bucket.matrices, key=lambda matrix: matrix.index):
        held = HeldElements(matrix.layout.elements_by_rank, cost)
        # One of several replicas sends; all of them receive.
        sent = wire.gather_bytes * matrix.layout.num_elements / held.num_elements_with_replicas
        num_bytes = max(sent, wire.scatter_bytes) / len(matrix.owners)
        for owner in matrix.owners:
            seconds[owner] += held.one_byte_seconds(owner) * num_bytes
    return max(seconds.values(), default=0.0)
