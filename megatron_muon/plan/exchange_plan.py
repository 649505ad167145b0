# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What every rank sends, receives and orthogonalizes, in which order: built once, integers only.

Vocabulary:

==============  ================================================================================
bucket          matrices that are gathered, orthogonalized and scattered together
local matrix    one that is whole on its owner alone: it is in no bucket, nothing of it travels
stack           parts of the same shape on one owner, orthogonalized in one call
message         the pieces that one rank sends to another in one bucket, in plan order
==============  ================================================================================
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_muon.plan.assignment import Assignment, matrix_seconds
from megatron_muon.plan.cost import CostModel, HeldElements, WireBytes
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.pipeline_estimate import pipeline_seconds
from megatron_muon.plan.routes import Part, Piece, moves_of, parts_of, pieces_of

# Tried besides as many as memory asks for: one leaves nothing to overlap, many leave ranks waiting.
_NUM_BUCKETS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Slot:
    """A part in a stack.

    Args:
        matrix: Index of the matrix.
        block: Index of the block.
        part: The rectangle.
        owners: Ranks that orthogonalize the block together; one unless it is cut.
    """

    matrix: int
    block: int
    part: Part
    owners: tuple[int, ...]


@dataclass(frozen=True)
class RankBucket:
    """What one rank does in one bucket.

    Args:
        stacks: Stacks it orthogonalizes, each a list of parts of one shape.
        kept: Pieces it holds and owns, which need not travel to it.
        gather_sends: Pieces for each other owner, in the order of messages.
        gather_receives: Pieces from each other source.
        scatter_sends: Results for each other holder.
        scatter_receives: Results from each other owner.
        has_gather: Whether any rank has to send rows.
    """

    stacks: tuple[tuple[Slot, ...], ...]
    kept: tuple[Piece, ...]
    gather_sends: dict[int, list[Piece]]
    gather_receives: dict[int, list[Piece]]
    scatter_sends: dict[int, list[Piece]]
    scatter_receives: dict[int, list[Piece]]
    has_gather: bool


class ExchangePlan:
    """Order the work of all ranks on a list of matrices.

    Buckets are slices of time: what a rank owns is dealt out longest first, so that each bucket
    holds about the same share of its time, and its local matrices fill the rest. As many buckets
    are made as memory asks for, or more where the pipeline is then estimated to be shorter.

    Rejected: a layer a bucket, or slices in parameter order. A layer has a handful of matrices, and
    most ranks would wait in each bucket for the few that own some
    (:func:`~megatron_muon.plan.pipeline_estimate.pipeline_seconds`).

    Args:
        matrices: Layouts, in parameter order.
        assignment: Their owners.
        cost: Rates of the machine, and sizes of stacks.
        wire: Bytes an element takes.
        bucket_elements: Elements of a bucket that a rank owns, or sends back where shards have
            copies, at most, unless one matrix has more; bounds the memory of staging buffers.

    Attributes:
        local: Matrices of which nothing travels.
        buckets: Matrices of each bucket, in parameter order.
        seconds: Estimated time of a step.
    """

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        assignment: Assignment,
        cost: CostModel,
        wire: WireBytes,
        *,
        bucket_elements: int,
    ) -> None:
        self.matrices = tuple(matrices)
        self.assignment = assignment
        self.owners = assignment.owners
        self.cost = cost
        self.wire = wire
        self._seconds = [
            matrix_seconds(matrix, cost, len(owners))
            for matrix, owners in zip(self.matrices, self.owners, strict=True)
        ]
        self.local = tuple(i for i in range(len(self.matrices)) if self._is_local(i))
        travelling = sorted(set(range(len(self.matrices))) - set(self.local))
        self._limit = max([bucket_elements, *map(self._staged_elements, travelling)])
        self.buckets, self.seconds = self._choose_buckets(travelling)

    def _is_local(self, index: int) -> bool:
        owners = self.owners[index]
        fragments = self.matrices[index].fragments
        return len(owners) == 1 and all(fragment.holders == owners for fragment in fragments)

    def _staged_elements(self, index: int) -> int:
        """Count what a rank has in its buffers of a matrix it owns, or sends back of it."""
        copies = sum(self.matrices[index].elements_by_rank.values())
        return -(-copies // len(self.owners[index]))

    def _choose_buckets(
        self, travelling: Sequence[int]
    ) -> tuple[tuple[tuple[int, ...], ...], float]:
        """Deal matrices out to the number of buckets with the shortest pipeline."""
        local: dict[int, float] = defaultdict(float)
        for index in self.local:
            local[self.owners[index][0]] += self._seconds[index]
        staged: dict[int, int] = defaultdict(int)
        for index in travelling:
            for owner in self.owners[index]:
                staged[owner] += self._staged_elements(index)
        needed = max((-(-elements // self._limit) for elements in staged.values()), default=0)
        numbers = sorted({needed, *(max(needed, number) for number in _NUM_BUCKETS)})
        found = []
        for number in numbers if travelling else [0]:
            buckets, work = self._deal(travelling, number)
            traffic = [self._traffic_seconds(bucket) for bucket in buckets]
            found.append((pipeline_seconds(work, local, traffic), number, buckets))
        seconds, _, buckets = min(found)
        return tuple(tuple(bucket) for bucket in buckets), seconds

    def _deal(
        self, travelling: Sequence[int], number: int
    ) -> tuple[list[list[int]], list[dict[int, float]]]:
        """Deal matrices out to so many buckets, or a few more where memory asks for them.

        Returns:
            Matrices of each bucket, and the Newton-Schulz time of each rank in each.
        """
        work: list[dict[int, float]] = [{} for _ in range(number)]
        staged: list[dict[int, int]] = [{} for _ in range(number)]
        buckets: list[list[int]] = [[] for _ in range(number)]
        for index in sorted(travelling, key=lambda i: (-self._seconds[i], i)):
            owners, elements = self.owners[index], self._staged_elements(index)
            best, best_load = -1, 0.0
            for bucket in range(len(buckets)):
                load = max([work[bucket].get(owner, 0.0) for owner in owners])
                filled = max([staged[bucket].get(owner, 0) for owner in owners])
                has_room = filled + elements <= self._limit
                if has_room and (best < 0 or load < best_load):
                    best, best_load = bucket, load
            if best < 0:
                best = len(buckets)
                for each in (work, staged):
                    each.append({})  # type: ignore[attr-defined]
                buckets.append([])
            buckets[best].append(index)
            for owner in owners:
                work[best][owner] = work[best].get(owner, 0.0) + self._seconds[index]
                staged[best][owner] = staged[best].get(owner, 0) + elements
        order = [number for number, bucket in enumerate(buckets) if bucket]
        return [sorted(buckets[n]) for n in order], [work[n] for n in order]

    def _traffic_seconds(self, bucket: Sequence[int]) -> float:
        """Estimate the time of a bucket's messages over the busiest owner's link, one way."""
        seconds: dict[int, float] = defaultdict(float)
        for index in bucket:
            matrix, owners = self.matrices[index], self.owners[index]
            elements = HeldElements(matrix.elements_by_rank, self.cost)
            there = self.wire.there * matrix.num_elements / elements.num_copies
            num_bytes = max(there, self.wire.back) / len(owners)
            for owner in owners:
                seconds[owner] += elements.seconds_per_byte(owner) * num_bytes
        return max(seconds.values(), default=0.0)

    def pieces(self, index: int) -> Iterator[Piece]:
        """Yield the pieces of a matrix."""
        return pieces_of(index, self.matrices[index], self.owners[index], self.cost)

    def moves(self, index: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what travels of a matrix: holder, owner, elements there, elements back."""
        return moves_of(self.matrices[index], self.owners[index], self.cost)

    def for_rank(self, rank: int) -> "RankPlan":
        """Return what one rank does."""
        return RankPlan(
            tuple(
                tuple(self._bucket_of_rank(bucket, rank) for bucket in slot)
                for slot in self._local_slots(rank)
            ),
            tuple(self._bucket_of_rank(bucket, rank) for bucket in self.buckets),
        )

    def _local_slots(self, rank: int) -> list[list[list[int]]]:
        """Deal local matrices out to the buckets in which the rank has the least to do.

        Returns:
            For each bucket, or a single one where there is none, groups up to the size of one.
        """
        mine = [index for index in self.local if self.owners[index] == (rank,)]
        loads = [
            sum(self._seconds[index] for index in bucket if rank in self.owners[index])
            for bucket in self.buckets
        ] or [0.0]
        slots: list[list[int]] = [[] for _ in loads]
        for index in sorted(mine, key=lambda i: (-self._seconds[i], i)):
            slot = min(range(len(loads)), key=lambda number: (loads[number], number))
            loads[slot] += self._seconds[index]
            slots[slot].append(index)
        return [self._grouped(sorted(slot)) for slot in slots]

    def _grouped(self, indices: Sequence[int]) -> list[list[int]]:
        groups: list[list[int]] = []
        elements = self._limit
        for index in indices:
            elements += self.matrices[index].num_elements
            if elements > self._limit:
                groups.append([])
                elements = self.matrices[index].num_elements
            groups[-1].append(index)
        return groups

    def _bucket_of_rank(self, bucket: Sequence[int], rank: int) -> RankBucket:
        kept = []
        sends: tuple[dict[int, list[Piece]], ...] = tuple(defaultdict(list) for _ in range(4))
        gather_sends, gather_receives, scatter_sends, scatter_receives = sends
        for index in bucket:
            matrix = self.matrices[index]
            if rank not in matrix.ranks:
                continue
            for piece in self.pieces(index):
                is_mine = rank in piece.holders
                if piece.owner == rank:
                    if piece.source != rank:
                        gather_receives[piece.source].append(piece)
                    for holder in piece.holders:
                        if holder != rank:
                            scatter_sends[holder].append(piece)
                    if is_mine:
                        kept.append(piece)
                elif is_mine:
                    scatter_receives[piece.owner].append(piece)
                    if piece.source == rank:
                        gather_sends[piece.owner].append(piece)
        return RankBucket(
            self._stacks(bucket, rank),
            tuple(kept),
            dict(gather_sends),
            dict(gather_receives),
            dict(scatter_sends),
            dict(scatter_receives),
            any(
                owner not in fragment.holders
                for index in bucket
                for fragment in self.matrices[index].fragments
                for owner in self.owners[index]
            ),
        )

    def _stacks(self, bucket: Sequence[int], rank: int) -> tuple[tuple[Slot, ...], ...]:
        """Group the parts of a rank by shape; a part of a cut block stands alone."""
        by_shape: dict[tuple[int, int], list[Slot]] = defaultdict(list)
        stacks: list[tuple[Slot, ...]] = []
        for index in bucket:
            owners = self.owners[index]
            if rank not in owners:
                continue
            for block, shape in enumerate(self.matrices[index].blocks):
                part = parts_of(shape, owners)[owners.index(rank)]
                slot = Slot(index, block, part, owners)
                if len(owners) > 1:
                    stacks.append((slot,))
                else:
                    by_shape[shape].append(slot)
        for shape, slots in by_shape.items():
            size = self.cost.stack_size(*shape)
            stacks += [tuple(slots[i : i + size]) for i in range(0, len(slots), size)]
        # Ranks that share several cut blocks must come to them in the same order.
        stacks.sort(key=lambda stack: (len(stack[0].owners) == 1, stack[0].matrix, stack[0].block))
        return tuple(stacks)

    @cached_property
    def sets_of_owners(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that share a cut matrix, ascending."""
        return tuple(sorted({owners for owners in self.owners if len(owners) > 1}))

    def entries(self) -> list[str]:
        """Describe each matrix by a line, for comparing plans across ranks."""
        bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        return [
            f"{matrix.fqn} {matrix.blocks} owners {owners} bucket {bucket_of.get(index, 'local')} "
            f"layout {zlib.crc32(repr(matrix.fragments).encode()):08x}"
            for index, (matrix, owners) in enumerate(zip(self.matrices, self.owners, strict=True))
        ]


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: its local matrices, and its share of every bucket.

    Args:
        local: Groups of local matrices to orthogonalize before each bucket, while its rows travel;
            one entry where there are no buckets.
        buckets: Every bucket of the plan, also those the rank has no part in: it joins all
            collectives.
    """

    local: tuple[tuple[RankBucket, ...], ...]
    buckets: tuple[RankBucket, ...]
