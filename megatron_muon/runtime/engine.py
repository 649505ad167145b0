# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run an exchange plan: local rows in, orthogonalized local rows out.

The order of a step, for buckets 0, 1, 2, ...::

    norms | gather 0 | gather 1 | local, orthogonalize 0 | scatter 0
          | gather 2 | local, orthogonalize 1 | scatter 1 | yield 0
          | gather 3 | local, orthogonalize 2 | scatter 2 | yield 1 | ...

Gathers and scatters are launched asynchronously: those of bucket i + 1 and i - 1 travel while
bucket i is orthogonalized. Local matrices, of which nothing travels, fill the buckets in which a
rank has less to do than others; those before bucket 0 fill the time of the first gather.

Over NCCL collectives run on the process group's own stream, and waiting for them is an event: the
host never waits. Over gloo they run on its threads.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import OwnedStacks, RankPlan, Stack
from megatron_muon.plan.routes import Route
from megatron_muon.runtime.exchange import BucketMessages, Exchange
from megatron_muon.runtime.newton_schulz import (
    NewtonSchulzSettings,
    newton_schulz,
    newton_schulz_normalized,
)
from megatron_muon.runtime.norms import BlockNorms
from megatron_muon.runtime.scratch import ShardScratch, in_shard
from megatron_muon.runtime.stacks import StackLayout


class MomentumRows(Protocol):
    """Where the engine reads what is orthogonalized."""

    def __call__(self, param: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a parameter's (Nesterov) momentum.

        It is called up to twice for each parameter in a step: once for the norm and once to send
        the rows. Both calls must return the same bits. Keeping the rows of all parameters between
        the two calls would take as much memory as the momentum itself.

        Args:
            param: The parameter.
            out: ``(local_rows, cols)`` float32 memory that the rows may be written to.

        Returns:
            ``(local_rows, cols)`` float32: ``out``, or memory that stays as it is until the next
            call.
        """
        ...


class Engine:
    """Orthogonalize the matrices of a plan, each once, on its owner.

    Every rank of the group makes the same collective calls in the same order.

    Args:
        plan: The plan, equal on all ranks of the group.
        newton_schulz: Steps, coefficients, precision and scale.
        parameters: By matrix of the plan, the parameters of which this rank holds rows.
        rank: This rank of the job.
        group: Ranks of the plan; None where nothing travels.
        parts_groups: By owners, the group of each set of ranks that split a matrix and that this
            rank is one of.
        device: Where shards live.

    Communication: a step is one all-reduce of 8 bytes a block (where rows travel in bf16), and for
        each bucket one ``all_to_all_single`` to the owners and one back, of the plan's routes
        without padding. Owners of a split matrix also all-reduce its Gram matrix in each step of
        Newton-Schulz, and its norm where rows travel in fp32.
    Memory: :attr:`buffers`, kept from construction on. For two buckets: what a rank receives of the
        matrices it owns and sends back of them (each at most ``max_numel`` of the plan), what it
        sends of its own rows and gets back, and stacks of what it owns (``max_numel``, and up to
        ``stack_elements`` of padding for each shape). Once more: stacks of one group of local
        matrices (``max_numel``), and twice the largest local shard in fp32. While a step runs: the
        results of two buckets, and what Newton-Schulz needs for one stack.
    """

    plan: ExchangePlan
    _parameters: Mapping[int, torch.Tensor]  # by matrix
    _gathers: Exchange  # rows, in the gather dtype
    _scatters: Exchange  # results, in the scatter dtype
    _stack_memory: list[torch.Tensor]  # flat: even buckets, odd buckets, local matrices
    _buckets: "list[_StackBatch]"
    _local: (
        "list[list[_StackBatch]]"  # groups of local matrices, by the bucket whose time they fill
    )
    _norms: BlockNorms
    _scratch: ShardScratch

    def __init__(
        self,
        plan: ExchangePlan,
        newton_schulz: NewtonSchulzSettings,
        parameters: Mapping[int, torch.Tensor],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        parts_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self._newton_schulz = newton_schulz
        self._parameters = parameters
        self._parts_groups = parts_groups
        self._device = device
        # fp32 rows are not normalized before they travel.
        normalized = range(len(plan.matrices)) if plan.wire.normalizes else ()
        self._norms = BlockNorms(plan, normalized, rank, group, device)
        self._scratch = ShardScratch(plan.matrices, rank, device)
        rank_plan = RankPlan.build(plan, rank)
        self._gathers = Exchange(
            group,
            [
                BucketMessages(bucket.gather_sends, bucket.gather_receives, bucket.has_gather)
                for bucket in rank_plan.buckets
            ],
            getattr(torch, plan.wire.gather_dtype),
            device,
        )
        self._scatters = Exchange(
            group,
            # Something always travels back: otherwise the matrix would be local.
            [
                BucketMessages(bucket.scatter_sends, bucket.scatter_receives, True)
                for bucket in rank_plan.buckets
            ],
            getattr(torch, plan.wire.scatter_dtype),
            device,
        )
        self._lay_out_stacks(rank_plan)

    def _lay_out_stacks(self, rank_plan: RankPlan) -> None:
        """Allocate the memory of stacks, and work out where this rank's rows go."""
        buckets = [self._stack_layout(bucket.owned) for bucket in rank_plan.buckets]
        local = [[self._stack_layout(owned) for owned in groups] for groups in rank_plan.local]
        # Two memories for buckets: a rank's own rows of bucket i + 1 are written to its stacks when
        # that gather is launched, before bucket i is orthogonalized. One for local matrices: each
        # group is done before the next one is packed.
        self._stack_memory = [
            self._allocate(buckets[0::2]),
            self._allocate(buckets[1::2]),
            self._allocate([layout for layouts in local for layout in layouts]),
        ]
        self._buckets = [
            _StackBatch.of(layout, self._stack_memory[index % 2], self._gathers.packing(index))
            for index, layout in enumerate(buckets)
        ]
        self._local = [
            [_StackBatch.of(layout, self._stack_memory[2], ()) for layout in layouts]
            for layouts in local
        ]

    def _stack_layout(self, owned: OwnedStacks) -> StackLayout:
        return StackLayout(owned, [self._stack_size(stack) for stack in owned.stacks])

    def _stack_size(self, stack: Stack) -> int:
        """Return how many matrices a stack has room for.

        Which batched kernel runs may depend on the number of matrices. So it follows from the shape
        alone, and results have the same bits on any number of ranks. Padding does not reach the
        matrices (`test_newton_schulz.py`). fp32 rows need none: they are orthogonalized one matrix
        by one.
        """
        part = stack[0]
        if not self.plan.wire.normalizes or len(part.owners) > 1:
            return len(stack)
        return self.plan.cost.stack_size(part.num_rows, part.num_cols)

    def _allocate(self, layouts: Sequence[StackLayout]) -> torch.Tensor:
        num_elements = max((layout.num_elements for layout in layouts), default=0)
        # Zeros, not empty: Newton-Schulz multiplies the padding too.
        dtype = getattr(torch, self.plan.wire.gather_dtype)
        return torch.zeros(num_elements, dtype=dtype, device=self._device)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Messages, stacks and scratch; norms add 8 bytes a block, and 2 MB on a CPU."""
        exchanges = [*self._gathers.buffers, *self._scatters.buffers]
        return [*exchanges, *self._stack_memory, self._scratch.buffer]

    @torch.no_grad()
    def orthogonalize(
        self, momentum_rows: MomentumRows
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Orthogonalize all matrices, and yield results as they arrive.

        The caller must exhaust the iterator: every rank joins the collectives of all buckets.
        Nothing is sent before the first item is asked for.

        Args:
            momentum_rows: Returns this rank's rows of what is orthogonalized.

        Yields:
            Each parameter of which this rank holds rows, with these rows of the scaled result,
            ``(local_rows, cols)`` float32. They lie in scratch memory: valid until the next one.
        """
        if self.plan.wire.normalizes:
            self._reduce_norms(momentum_rows)
        num_buckets = len(self._buckets)
        gathering = self._start_gather(0, momentum_rows) if num_buckets else None
        if not num_buckets:
            yield from self._orthogonalize_local(0, momentum_rows)
        scattering: _Scattering | None = None
        for index in range(num_buckets):
            following = None
            if index + 1 < num_buckets:
                following = self._start_gather(index + 1, momentum_rows)
            yield from self._orthogonalize_local(index, momentum_rows)
            results = self._orthogonalize_gathered(index, gathering)
            started = self._start_scatter(index, results)
            # The results of the bucket before are only waited for now: they had all of this
            # bucket's Newton-Schulz to travel.
            if scattering is not None:
                yield from self._finish(scattering)
            scattering, gathering = started, following
        if scattering is not None:
            yield from self._finish(scattering)
        self._norms.clear()

    def _rows(self, index: int, momentum_rows: MomentumRows) -> torch.Tensor:
        """Return this rank's rows of a matrix; the first scratch may hold them."""
        return momentum_rows(self._parameters[index], self._scratch.view(index))

    def _reduce_norms(self, momentum_rows: MomentumRows) -> None:
        # An exception, here or in the caller's loop, may have ended the last step early.
        self._norms.clear()
        for index in self._norms.matrices:
            self._norms.add(index, self._rows(index, momentum_rows))
        self._norms.reduce()

    def _pack(self, batch: "_StackBatch", momentum_rows: MomentumRows) -> None:
        """Copy this rank's rows to where they go: into messages, or its own stacks."""
        for index, targets in batch.targets.items():
            rows = self._rows(index, momentum_rows)
            routes = [route for route, _ in targets]
            if self.plan.wire.normalizes:
                rows = self._normalized(index, rows, routes)
            # One fused copy for each matrix; it casts to the dtype of the wire.
            torch._foreach_copy_(
                [target for _, target in targets], [in_shard(rows, route) for route in routes]
            )

    def _normalized(self, index: int, rows: torch.Tensor, routes: Sequence[Route]) -> torch.Tensor:
        """Divide routes of a shard by the norms of their blocks, in fp32."""
        # The second scratch: the first one may hold the rows.
        normalized = self._scratch.view(index, 1)
        for route in routes:
            torch.div(in_shard(rows, route), self._norms.of(route), out=in_shard(normalized, route))
        return normalized

    def _orthogonalize_local(
        self, index: int, momentum_rows: MomentumRows
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Orthogonalize the local matrices that fill a bucket's time."""
        for batch in self._local[index]:
            self._pack(batch, momentum_rows)
            yield from self._scaled(batch.layout.kept_results(self._orthogonalize(batch)))

    def _start_gather(self, index: int, momentum_rows: MomentumRows) -> dist.Work | None:
        self._pack(self._buckets[index], momentum_rows)
        return self._gathers.start(index)

    def _orthogonalize_gathered(
        self, index: int, gathering: dist.Work | None
    ) -> list[torch.Tensor]:
        """Wait for the rows of a bucket, and orthogonalize what this rank owns."""
        batch = self._buckets[index]
        if gathering is not None:
            gathering.wait()
        arrived = self._gathers.unpacking(index)
        if arrived:
            # Messages hold routes one behind the other; a matrix needs them row by row.
            torch._foreach_copy_(
                [batch.layout.place(batch.memory, route) for route, _ in arrived],
                [rows for _, rows in arrived],
            )
        return self._orthogonalize(batch)

    def _orthogonalize(self, batch: "_StackBatch") -> list[torch.Tensor]:
        """Return one tensor for each stack, in new memory."""
        run = newton_schulz_normalized if self.plan.wire.normalizes else newton_schulz
        results = []
        for stack, tensor in batch.layout.stacks(batch.memory):
            part = stack[0]
            result = run(
                tensor,
                steps=self._newton_schulz.steps,
                coefficient_type=self._newton_schulz.coefficient_type,
                whole_shape=self.plan.matrices[part.matrix].blocks[part.block],
                parts_group=self._parts_groups[part.owners] if len(part.owners) > 1 else None,
            )
            results.append(result)
        return results

    def _start_scatter(self, index: int, results: Sequence[torch.Tensor]) -> "_Scattering":
        layout, packing = self._buckets[index].layout, self._scatters.packing(index)
        if packing:
            torch._foreach_copy_(
                [target for _, target in packing],
                [layout.result(results, route) for route, _ in packing],
            )
        # What stays here keeps the results alive until it is applied, a bucket later.
        return _Scattering(index, layout.kept_results(results), self._scatters.start(index))

    def _finish(self, scattering: "_Scattering") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Wait for the results of a bucket, and yield this rank's rows."""
        if scattering.handle is not None:
            scattering.handle.wait()
        arrived = self._scatters.unpacking(scattering.bucket)
        yield from self._scaled([*scattering.kept, *arrived])

    def _scaled(
        self, results: Sequence[tuple[Route, torch.Tensor]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Join the results of each matrix to this rank's rows, and scale them in fp32."""
        by_matrix: dict[int, list[tuple[Route, torch.Tensor]]] = defaultdict(list)
        for route, result in results:
            by_matrix[route.matrix].append((route, result))
        for index, pairs in by_matrix.items():
            rows = self._scratch.view(index)
            views = [in_shard(rows, route) for route, _ in pairs]
            torch._foreach_copy_(views, [result for _, result in pairs])
            # Query, key and value have factors of their own. Upstream multiplies with one factor
            # after the other; their product would round differently.
            blocks = self.plan.matrices[index].blocks
            factors = [self._newton_schulz.scale(*blocks[route.block]) for route, _ in pairs]
            for one_factor_each in zip(*factors, strict=True):
                torch._foreach_mul_(views, list(one_factor_each))
            yield self._parameters[index], rows


class _StackBatch(NamedTuple):
    """The stacks of one bucket, or of one group of local matrices, and their memory.

    Args:
        layout: Where parts lie.
        memory: Flat memory, shared with batches that are done at other times.
        targets: By matrix, where this rank's rows go: into messages, or its own stacks.
    """

    layout: StackLayout
    memory: torch.Tensor
    targets: Mapping[int, Sequence[tuple[Route, torch.Tensor]]]

    @classmethod
    def of(
        cls,
        layout: StackLayout,
        memory: torch.Tensor,
        packing: Sequence[tuple[Route, torch.Tensor]],
    ) -> "_StackBatch":
        """Group the targets by matrix, so that the rows of each are read once."""
        targets: dict[int, list[tuple[Route, torch.Tensor]]] = defaultdict(list)
        for route, target in packing:
            targets[route.matrix].append((route, target))
        for route in layout.kept:
            targets[route.matrix].append((route, layout.place(memory, route)))
        return cls(layout, memory, targets)


class _Scattering(NamedTuple):
    """Results on their way: those that stay here, and what to wait for."""

    bucket: int
    kept: list[tuple[Route, torch.Tensor]]
    handle: dist.Work | None
