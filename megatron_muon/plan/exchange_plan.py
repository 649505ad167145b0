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

from megatron_muon.assignment import Assignment, matrix_seconds
from megatron_muon.cost import CostModel
from megatron_muon.layout import MatrixLayout
from megatron_muon.plan.pieces import Part, Piece, moves_of, parts_of, pieces_of

# Fewer buckets leave nothing to overlap; more only where memory asks for them.
_MIN_BUCKETS = 4


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
        matrices: Matrices of which it holds rows.
        has_gather: Whether any rank has to send rows.
    """

    stacks: tuple[tuple[Slot, ...], ...]
    kept: tuple[Piece, ...]
    gather_sends: dict[int, list[Piece]]
    gather_receives: dict[int, list[Piece]]
    scatter_sends: dict[int, list[Piece]]
    scatter_receives: dict[int, list[Piece]]
    matrices: tuple[int, ...]
    has_gather: bool


class ExchangePlan:
    """Order the work of all ranks on a list of matrices.

    Buckets are slices of time: of the matrices a rank owns, in parameter order and so in the order
    of FSDP units, each bucket holds the same share of its seconds. All ranks then finish a bucket
    at about the same time. One layer a bucket would leave most ranks idle, because a layer has a
    handful of matrices.

    Args:
        matrices: Layouts, in parameter order.
        assignment: Their owners.
        cost: Rates of the machine, and sizes of stacks.
        bucket_elements: Elements of a bucket that a rank owns, at most, unless one matrix is
            larger; bounds the memory of staging buffers.
    """

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        assignment: Assignment,
        cost: CostModel,
        *,
        bucket_elements: int,
    ) -> None:
        self.matrices = tuple(matrices)
        self.assignment = assignment
        self.owners = assignment.owners
        self.cost = cost
        self._bucket_elements = bucket_elements
        self.local = tuple(i for i in range(len(self.matrices)) if self._is_local(i))
        self.buckets = self._slices_of_time()

    def _is_local(self, index: int) -> bool:
        owners = self.owners[index]
        return all(fragment.holders == owners for fragment in self.matrices[index].fragments)

    def _slices_of_time(self) -> tuple[tuple[int, ...], ...]:
        """Cut the queue of every owner into slices of equal time, and of bounded size."""
        travelling = [i for i in range(len(self.matrices)) if not self._is_local(i)]
        seconds = {i: matrix_seconds(self.matrices[i], self.cost) for i in travelling}
        queues: dict[int, list[int]] = defaultdict(list)
        for index in travelling:
            for owner in self.owners[index]:
                queues[owner].append(index)
        num_slices = 1
        for queue in queues.values():
            needed = -(-sum(map(self._owned_elements, queue)) // self._bucket_elements)
            num_slices = max(num_slices, needed, min(_MIN_BUCKETS, len(queue)))
        totals = {rank: sum(seconds[i] for i in queue) or 1.0 for rank, queue in queues.items()}
        done = dict.fromkeys(queues, 0.0)
        bucket_of, filled = dict.fromkeys(queues, 0), dict.fromkeys(queues, 0)
        buckets: dict[int, list[int]] = defaultdict(list)
        for index in travelling:
            owners, elements = self.owners[index], self._owned_elements(index)
            bucket = max(
                max(bucket_of[owner], int(done[owner] / totals[owner] * num_slices))
                for owner in owners
            )
            bucket += any(
                bucket_of[owner] == bucket and 0 < filled[owner] > self._bucket_elements - elements
                for owner in owners
            )
            buckets[bucket].append(index)
            for owner in owners:
                filled[owner] = elements + (filled[owner] if bucket_of[owner] == bucket else 0)
                bucket_of[owner] = bucket
                done[owner] += seconds[index]
        return tuple(tuple(buckets[key]) for key in sorted(buckets))

    def _owned_elements(self, index: int) -> int:
        """Count the elements of a matrix on each of its owners, rounded up."""
        return -(-self.matrices[index].num_elements // len(self.owners[index]))

    def pieces(self, index: int) -> Iterator[Piece]:
        """Yield the pieces of a matrix."""
        return pieces_of(index, self.matrices[index], self.owners[index], self.cost)

    def moves(self, index: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what travels of a matrix: holder, owner, elements there, elements back."""
        return moves_of(self.matrices[index], self.owners[index], self.cost)

    def for_rank(self, rank: int) -> "RankPlan":
        """Return what one rank does."""
        return RankPlan(
            tuple(self._bucket_of_rank(bucket, rank) for bucket in self._local_buckets(rank)),
            tuple(self._bucket_of_rank(bucket, rank) for bucket in self.buckets),
        )

    def _local_buckets(self, rank: int) -> list[list[int]]:
        """Group the local matrices of a rank up to the size of a bucket."""
        buckets: list[list[int]] = []
        elements = self._bucket_elements
        for index in self.local:
            if self.owners[index] == (rank,):
                elements += self.matrices[index].num_elements
                if elements > self._bucket_elements:
                    buckets.append([])
                    elements = self.matrices[index].num_elements
                buckets[-1].append(index)
        return buckets

    def _bucket_of_rank(self, bucket: Sequence[int], rank: int) -> RankBucket:
        kept, held = [], []
        sends: tuple[dict[int, list[Piece]], ...] = tuple(defaultdict(list) for _ in range(4))
        gather_sends, gather_receives, scatter_sends, scatter_receives = sends
        for index in bucket:
            matrix = self.matrices[index]
            if rank not in matrix.ranks:
                continue
            is_held = False
            for piece in self.pieces(index):
                is_mine = rank in piece.holders
                is_held |= is_mine
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
            if is_held:
                held.append(index)
        return RankBucket(
            self._stacks(bucket, rank),
            tuple(kept),
            dict(gather_sends),
            dict(gather_receives),
            dict(scatter_sends),
            dict(scatter_receives),
            tuple(held),
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
        local: Local matrices, in groups of the size of a bucket; nothing travels.
        buckets: Every bucket of the plan, also those the rank has no part in: it joins all
            collectives.
    """

    local: tuple[RankBucket, ...]
    buckets: tuple[RankBucket, ...]
