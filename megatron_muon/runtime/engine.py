# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run an exchange plan: local rows in, orthogonalized local rows out, one call a step.

Vocabulary:

==============  ================================================================================
wire ``fp32``   fp32 rows travel to the owner, who calls emerging-optimizers' Newton-Schulz
wire ``bf16``   squared norms are all-reduced in float64; normalized bf16 rows travel there,
                bf16 results back
update          what is orthogonalized: the (Nesterov) momentum, this rank's rows of it
staging buffer  flat memory that messages are packed into or arrive in; two of each kind, re-used
scratch         fp32 memory of one shard; allocating it anew would cost more than filling it
==============  ================================================================================

The order of a step, for buckets 0, 1, 2, ...::

    norms | gather 0 | gather 1 | local, orthogonalize 0 | scatter 0
          | gather 2 | local, orthogonalize 1 | scatter 1 | apply 0
          | gather 3 | local, orthogonalize 2 | scatter 2 | apply 1 | ...

Local matrices, of which nothing travels, fill the buckets in which a rank has less to do than in
others; those before bucket 0 fill the time of the first gather. Gathers and scatters are launched
asynchronously, so that those of bucket i + 1 and i - 1 travel while bucket i is orthogonalized.
Over NCCL they run on the process group's own stream, and waiting for them is an event: the host
never waits. Over gloo they run on its threads.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.plan import ExchangePlan, Piece, RankBucket, Slot
from megatron_muon.runtime.exchange import Exchange, Messages, all_reduce_norms
from megatron_muon.runtime.newton_schulz import EPSILON, newton_schulz, newton_schulz_normalized
from megatron_muon.runtime.norms import SumOfSquares

type Update = Callable[[int, torch.Tensor], torch.Tensor]
type Apply = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class NewtonSchulzSettings:
    """How matrices are orthogonalized and scaled.

    Args:
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        is_bf16: Whether it runs in bf16 (matmul precision "medium"); its results are then
            bf16-valued and travel as bf16 on either wire.
        scale: Factors that results are multiplied with in fp32, one after the other, by shape
            ``(rows, cols)`` of the whole block.
    """

    steps: int
    coefficient_type: str
    is_bf16: bool
    scale: Callable[[int, int], Sequence[float]]


class Engine:
    """Orthogonalize the matrices of a plan, each once, on its owner.

    Every rank of the group makes the same collective calls in the same order.

    Args:
        plan: The plan, equal on all ranks of the group.
        settings: Newton-Schulz and scale.
        wire: ``bf16`` or ``fp32``; see :class:`~megatron_muon.plan.settings.ExchangeSettings`.
        rank: This rank of the job.
        group: Ranks the plan speaks of; None where nothing travels.
        parts_groups: Group of each set of ranks that share a cut matrix, as far as this rank is
            in it.
        device: Where shards live.

    Communication: a step is one all-reduce of 8 bytes a block (wire ``bf16``), and for each bucket
        one ``all_to_all_single`` there and one back, of the plan's pieces without padding; cut
        matrices add their Gram matrices.
    Memory: kept from construction on, :attr:`staging_bytes`: for two buckets what a rank receives
        of the matrices it owns and sends back of them (each at most ``limit`` elements), what it
        sends of its own rows and gets back, and stacks of what it owns (``limit``, and up to
        ``stack_elements`` of padding for each shape); stacks of one group of local matrices
        (``limit`` again); twice the largest local shard in fp32. ``limit`` is ``bucket_elements``
        or one matrix; where shards have copies, results count once for each, so one matrix may
        take ``copies`` times its size. While a step runs: the results of two buckets, and what
        Newton-Schulz needs for one stack.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        settings: NewtonSchulzSettings,
        *,
        wire: str,
        rank: int,
        group: dist.ProcessGroup | None,
        parts_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self.plan, self.settings, self.wire, self.rank = plan, settings, wire, rank
        self._group, self._parts_groups, self._device = group, parts_groups, device
        self._dtype = torch.bfloat16 if wire == "bf16" else torch.float32
        rank_plan = plan.for_rank(rank)
        self._buckets = [_Bucket(bucket, self._num_slots) for bucket in rank_plan.buckets]
        self._local = [
            [_Bucket(bucket, self._num_slots) for bucket in slot] for slot in rank_plan.local
        ]
        self._gathers = Exchange(
            group,
            [
                Messages(bucket.gather_sends, bucket.gather_receives, bucket.has_gather)
                for bucket in rank_plan.buckets
            ],
            self._dtype,
            device,
        )
        self._scatters = Exchange(
            group,
            [
                Messages(bucket.scatter_sends, bucket.scatter_receives, True)
                for bucket in rank_plan.buckets
            ],
            torch.bfloat16 if settings.is_bf16 else torch.float32,
            device,
        )
        self._stack_memory = [
            *(self._allocate(self._buckets[start::2]) for start in range(2)),
            self._allocate([bucket for slot in self._local for bucket in slot]),
        ]
        self._loads = [
            self._loads_of(bucket, self._stack_memory[index % 2], self._gathers.packing(index))
            for index, bucket in enumerate(self._buckets)
        ]
        self._local_loads = [
            [(bucket, self._loads_of(bucket, self._stack_memory[2], ())) for bucket in slot]
            for slot in self._local
        ]
        self._first_norm = [0]
        for matrix in plan.matrices:
            self._first_norm.append(self._first_norm[-1] + len(matrix.blocks))
        self._norm_pieces = self._primary_pieces() if wire == "bf16" else {}
        self._norm_blocks = torch.tensor(
            [
                self._first_norm[index] + piece.block
                for index, pieces in self._norm_pieces.items()
                for piece in pieces
            ],
            dtype=torch.int64,
            device=device,
        )
        self._norms: tuple[torch.Tensor, ...] = ()
        self._sum_of_squares = SumOfSquares(device)
        self._local_shapes = self._shapes_of_shards()
        elements = max(map(math.prod, self._local_shapes.values()), default=0)
        self._scratch = torch.empty(2, elements, dtype=torch.float32, device=device)

    def _shapes_of_shards(self) -> dict[int, tuple[int, int]]:
        """Return the shape of this rank's shard of each matrix it holds rows of."""
        shapes: dict[int, tuple[int, int]] = {}
        for index, matrix in enumerate(self.plan.matrices):
            for fragment in matrix.fragments:
                if self.rank in fragment.holders:
                    rows, _ = shapes.get(index, (0, 0))
                    last = fragment.local_row + fragment.num_rows
                    shapes[index] = (max(rows, last), fragment.num_cols)
        return shapes

    def _scratch_for(self, index: int, number: int) -> torch.Tensor:
        """View a scratch in the shape of this rank's shard of a matrix."""
        shape = self._local_shapes[index]
        return self._scratch[number, : math.prod(shape)].view(shape)

    @staticmethod
    def _loads_of(
        bucket: "_Bucket",
        memory: torch.Tensor,
        packing: Sequence[tuple[Piece, torch.Tensor]],
    ) -> dict[int, list[tuple[Piece, torch.Tensor]]]:
        """List where the pieces of this rank's shards go: into messages, or its own stacks."""
        loads: dict[int, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
        for piece, target in packing:
            loads[piece.matrix].append((piece, target))
        for piece in bucket.plan.kept:
            loads[piece.matrix].append((piece, bucket.place(memory, piece)))
        return loads

    def _allocate(self, buckets: Sequence["_Bucket"]) -> torch.Tensor:
        num_elements = max((bucket.num_elements for bucket in buckets), default=0)
        return torch.zeros(num_elements, dtype=self._dtype, device=self._device)

    @property
    def staging_bytes(self) -> int:
        """Memory of all staging buffers, stacks and scratch, bytes."""
        stacks = sum(memory.nbytes for memory in self._stack_memory)
        messages = self._gathers.num_bytes + self._scatters.num_bytes
        return messages + stacks + self._scratch.nbytes

    def _num_slots(self, stack: Sequence[Slot]) -> int:
        """Return the size of a stack with padding.

        Batched kernels may depend on it, so it is that of the shape, and results are the same on
        any number of ranks. What lies in the slots that are left over does not reach the others
        (tests/unit_tests/test_newton_schulz.py). Wire fp32 calls Newton-Schulz matrix by matrix.
        """
        if self.wire == "fp32" or len(stack[0].owners) > 1:
            return len(stack)
        return self.plan.cost.stack_size(stack[0].part.num_rows, stack[0].part.num_cols)

    def _primary_pieces(self) -> dict[int, list[Piece]]:
        """List the pieces whose squares this rank adds up: of several holders the first does."""
        pieces: dict[int, list[Piece]] = {}
        for index, matrix in enumerate(self.plan.matrices):
            if self.rank in matrix.ranks:
                mine = [p for p in self.plan.pieces(index) if p.holders[0] == self.rank]
                if mine:
                    pieces[index] = mine
        return pieces

    @torch.no_grad()
    def step(self, update: Update, apply: Apply) -> None:
        """Orthogonalize all matrices.

        Args:
            update: Gives this rank's rows of a matrix, ``(local_rows, cols)`` fp32, in the scratch
                it is passed or elsewhere; called up to twice for each matrix (up to once on the
                fp32 wire), and must give the same bits each time.
            apply: Takes this rank's rows of the scaled result, ``(local_rows, cols)`` fp32, in
                scratch memory; called once for each matrix of which this rank holds rows.
        """
        if self.wire == "bf16":
            self._norms = self._reduce_norms(update)
        num_buckets = len(self._buckets)
        gathering = self._gather(0, update) if num_buckets else None
        if not num_buckets:
            self._run_local(0, update, apply)
        scattering: _Scattering | None = None
        for index in range(num_buckets):
            following = self._gather(index + 1, update) if index + 1 < num_buckets else None
            self._run_local(index, update, apply)
            results = self._orthogonalize_gathered(index, gathering)
            scattered = self._scatter(index, results)
            if scattering is not None:
                self._finish(scattering, apply)
            scattering, gathering = scattered, following
        if scattering is not None:
            self._finish(scattering, apply)
        self._norms = ()

    def _run_local(self, index: int, update: Update, apply: Apply) -> None:
        """Orthogonalize and apply the local matrices that fill a bucket's time."""
        for bucket, loads in self._local_loads[index]:
            self._load(loads, update)
            self._apply(bucket.kept(self._orthogonalize(bucket, self._stack_memory[2])), apply)

    def _reduce_norms(self, update: Update) -> tuple[torch.Tensor, ...]:
        """Return the Frobenius norm of every block, fp32 scalars."""
        sums: list[torch.Tensor] = []
        for index, pieces in self._norm_pieces.items():
            rows = update(index, self._scratch_for(index, 0))
            sums += self._sum_of_squares([_local(rows, piece) for piece in pieces])
        squares = torch.zeros(self._first_norm[-1], dtype=torch.float64, device=self._device)
        if sums:
            squares.index_add_(0, self._norm_blocks, torch.stack(sums))
        if self._group is not None:
            all_reduce_norms(squares, self._group)
        return squares.sqrt_().clamp_min_(EPSILON).float().unbind()

    def _load(
        self, loads: Mapping[int, Sequence[tuple[Piece, torch.Tensor]]], update: Update
    ) -> None:
        """Copy this rank's rows of a bucket to where they go, normalized on the bf16 wire."""
        for index, pairs in loads.items():
            rows = update(index, self._scratch_for(index, 0))
            if self.wire == "bf16":
                rows = self._normalized(rows, [piece for piece, _ in pairs])
            torch._foreach_copy_(
                [target for _, target in pairs], [_local(rows, piece) for piece, _ in pairs]
            )

    def _normalized(self, rows: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        """Divide pieces of a shard by the norms of their blocks, in fp32."""
        normalized = self._scratch_for(pieces[0].matrix, 1)
        for piece in pieces:
            norm = self._norms[self._first_norm[piece.matrix] + piece.block]
            torch.div(_local(rows, piece), norm, out=_local(normalized, piece))
        return normalized

    def _gather(self, index: int, update: Update) -> dist.Work | None:
        self._load(self._loads[index], update)
        return self._gathers.start(index)

    def _orthogonalize_gathered(self, index: int, work: dist.Work | None) -> list[torch.Tensor]:
        """Wait for the rows of a bucket, and orthogonalize what this rank owns."""
        bucket, memory = self._buckets[index], self._stack_memory[index % 2]
        if work is not None:
            work.wait()
        arrived = self._gathers.unpacking(index)
        if arrived:
            torch._foreach_copy_(
                [bucket.place(memory, piece) for piece, _ in arrived],
                [rows for _, rows in arrived],
            )
        return self._orthogonalize(bucket, memory)

    def _orthogonalize(self, bucket: "_Bucket", memory: torch.Tensor) -> list[torch.Tensor]:
        run = newton_schulz_normalized if self.wire == "bf16" else newton_schulz
        results = []
        for stack, tensor in bucket.stacks(memory):
            slot = stack[0]
            result = run(
                tensor,
                steps=self.settings.steps,
                coefficient_type=self.settings.coefficient_type,
                whole_shape=self.plan.matrices[slot.matrix].blocks[slot.block],
                parts_group=self._parts_groups[slot.owners] if len(slot.owners) > 1 else None,
            )
            results.append(result)
        return results

    def _scatter(self, index: int, results: Sequence[torch.Tensor]) -> "_Scattering":
        bucket = self._buckets[index]
        packing = self._scatters.packing(index)
        if packing:
            torch._foreach_copy_(
                [target for _, target in packing],
                [bucket.result(results, piece) for piece, _ in packing],
            )
        return _Scattering(index, bucket.kept(results), self._scatters.start(index))

    def _finish(self, scattering: "_Scattering", apply: Apply) -> None:
        """Wait for the results of a bucket, and apply this rank's rows."""
        if scattering.work is not None:
            scattering.work.wait()
        self._apply([*scattering.kept, *self._scatters.unpacking(scattering.bucket)], apply)

    def _apply(self, results: Sequence[tuple[Piece, torch.Tensor]], apply: Apply) -> None:
        """Put the results of each matrix together, scale them, and hand them over."""
        by_matrix: dict[int, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
        for piece, result in results:
            by_matrix[piece.matrix].append((piece, result))
        for index, pairs in by_matrix.items():
            rows = self._scratch_for(index, 0)
            views = [_local(rows, piece) for piece, _ in pairs]
            torch._foreach_copy_(views, [result for _, result in pairs])
            blocks = self.plan.matrices[index].blocks
            factors = [self.settings.scale(*blocks[piece.block]) for piece, _ in pairs]
            for each in zip(*factors, strict=True):
                torch._foreach_mul_(views, list(each))
            apply(index, rows)


class _Bucket:
    """Where the parts that a rank owns in a bucket lie in its stack memory."""

    def __init__(self, plan: RankBucket, num_slots: Callable[[Sequence[Slot]], int]) -> None:
        self.plan = plan
        self._shapes: list[tuple[int, int, int]] = []
        self._offsets = [0]
        self._position: dict[tuple[int, int], tuple[int, int]] = {}
        for stack in plan.stacks:
            part = stack[0].part
            shape = (num_slots(stack), part.num_rows, part.num_cols)
            for number, slot in enumerate(stack):
                self._position[slot.matrix, slot.block] = (len(self._shapes), number)
            self._shapes.append(shape)
            self._offsets.append(self._offsets[-1] + math.prod(shape))

    @property
    def num_elements(self) -> int:
        """Elements of all stacks, padding included."""
        return self._offsets[-1]

    def stacks(self, memory: torch.Tensor) -> Iterator[tuple[tuple[Slot, ...], torch.Tensor]]:
        """Yield each stack with its tensor; slots without a matrix hold anything."""
        for number, stack in enumerate(self.plan.stacks):
            yield stack, self._stack(memory, number)

    def _stack(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        start, stop = self._offsets[number : number + 2]
        return memory[start:stop].view(self._shapes[number])

    def place(self, memory: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return where a piece belongs in the stacks."""
        number, slot = self._position[piece.matrix, piece.block]
        return _in_part(self._stack(memory, number)[slot], piece)

    def result(self, results: Sequence[torch.Tensor], piece: Piece) -> torch.Tensor:
        """Return a piece of the orthogonalized stacks."""
        number, slot = self._position[piece.matrix, piece.block]
        return _in_part(results[number][slot], piece)

    def kept(self, results: Sequence[torch.Tensor]) -> list[tuple[Piece, torch.Tensor]]:
        """Return the pieces of the results that this rank holds itself."""
        return [(piece, self.result(results, piece)) for piece in self.plan.kept]


class _Scattering(NamedTuple):
    """Results on their way: those that stay here, and what to wait for."""

    bucket: int
    kept: list[tuple[Piece, torch.Tensor]]
    work: dist.Work | None


def _local(rows: torch.Tensor, piece: Piece) -> torch.Tensor:
    """View a piece in a shard."""
    return rows[
        piece.local_row : piece.local_row + piece.num_rows,
        piece.local_col : piece.local_col + piece.num_cols,
    ]


def _in_part(part: torch.Tensor, piece: Piece) -> torch.Tensor:
    """View a piece in the part it belongs to."""
    return part[piece.row : piece.row + piece.num_rows, piece.col : piece.col + piece.num_cols]
