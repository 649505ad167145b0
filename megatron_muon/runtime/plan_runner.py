# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run one plan on this rank: the actions of a step on one bucket."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import profiler

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings, StackMethod
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import OwnedStacks, RankPlan
from megatron_muon.plan.staging import BucketSizes
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.exchange import (
    BucketMessages,
    Chain,
    Exchange,
    Later,
    ReplicaAllGather,
    consecutive_views,
    route_view,
    wait,
)
from megatron_muon.runtime.local_rows import (
    Handle,
    LocalRows,
    RowTransfer,
    StackBuffers,
    StackTask,
)
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.row_moves import Addresses, RowMoves


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Show the body as ``Muon.NAME`` in profiles.

    ``torch.profiler`` and ``torch.autograd.profiler.emit_nvtx``, for Nsight Systems, set the flag.
    ``record_function`` itself does not ask: it would call into torch in every step.
    """
    if profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"Muon.{name}")
    return nullcontext()


class BoundPlan(NamedTuple):
    """A plan with the handles and process groups of this rank.

    Args:
        plan: The plan, equal on all ranks of the group.
        handles: By matrix of the plan, handles of the rows that this rank holds.
        group: Ranks of the plan; None for a rank alone.
        replica_group: Ranks that hold the same rows; None if there are no others.
        parts_groups: The process groups of the sets of owners that this rank belongs to.
    """

    plan: ExchangePlan
    handles: Mapping[int, Handle]
    group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None
    parts_groups: Mapping[tuple[int, ...], dist.ProcessGroup]


class _Batch(NamedTuple):
    """Stacks that are orthogonalized together.

    Args:
        stacks: Their memory.
        tasks: By stack, its orthogonalization.
        own_rows: Copies this rank's rows to the stacks.
        own_results: Copies results to this rank's rows, if no replica needs them.
    """

    stacks: StackBuffers
    tasks: list[StackTask]
    own_rows: RowTransfer
    own_results: RowTransfer


class PlanRunner:
    """Gather, orthogonalize and scatter the buckets of one plan, in an arena.

    Args:
        bound: The plan.
        rank_plan: This rank's part of it.
        offsets: Offsets of the buffers of all buckets in the arena.
        local_offsets: Offsets of the stacks of local matrices.
        newton_schulz: Steps, coefficients, precision and scale.
        arena: Memory of a step.
        chain: Starts the all-gathers of replicas.
        addresses: Of the arena, whose number is 0.
        rows_device: Where local rows are.

    Attributes:
        plan: The plan.
        moments: State of a method; None without one.
        rows: This rank's rows.
        watch: Called with every stack of results; None for no call.

    Communication: see ``Engine``.
    """

    watch: Callable[[StackTask], None] | None = None
    _gathers: Exchange  # rows, in the gather dtype
    _scatters: Exchange  # results, in the scatter dtype
    _all_gather: ReplicaAllGather | None  # results, between replicas
    _buckets: list[_Batch]
    _local: list[_Batch]
    # Rows to messages, and messages to stacks, by bucket.
    _packing: list[RowTransfer]
    _unpacking: list[RowMoves]
    # Results to messages, and messages to rows, by bucket.
    _packing_results: list[RowMoves]
    _arrivals: list[RowTransfer]
    # Collectives in flight, by bucket; None if nothing is sent. With replicas a
    # scatter is in flight until its all-gather has ended.
    _gathering: dict[int, dist.Work | Later | None]
    _scattering: dict[int, dist.Work | Later | None]

    def __init__(
        self,
        bound: BoundPlan,
        rank_plan: RankPlan,
        offsets: Sequence[BucketSizes],
        local_offsets: Sequence[int],
        newton_schulz: NewtonSchulzSettings,
        arena: Arena,
        chain: Chain,
        addresses: Addresses,
        *,
        rows_device: torch.device,
    ) -> None:
        self.plan = bound.plan
        self._parts_groups = bound.parts_groups
        self._newton_schulz = newton_schulz
        self._chain = chain
        self._addresses = addresses
        method = newton_schulz.method
        self.moments = None
        if method is not None:
            self.moments = Moments(
                self.plan.matrices,
                method.state_shape,
                bound.group,
                addresses.device,
                by_owner=isinstance(method, StackMethod),
            )
        self.rows = LocalRows(
            self.plan,
            newton_schulz,
            bound.handles,
            self.moments,
            bound.group,
            addresses,
            rows_device,
        )
        self._gathering, self._scattering = {}, {}
        self._lay_out(bound, rank_plan, offsets, local_offsets, arena)
        self._lay_out_scatters(bound, rank_plan, offsets, arena)

    def _lay_out(
        self,
        bound: BoundPlan,
        rank_plan: RankPlan,
        offsets: Sequence[BucketSizes],
        local_offsets: Sequence[int],
        arena: Arena,
    ) -> None:
        """View gathers and stacks in the arena."""
        row_dtype = getattr(torch, self.plan.dtypes.gather_dtype)
        stack_dtype = getattr(torch, self.plan.dtypes.stack_dtype)
        messages, sends, receives = [], [], []
        self._buckets, self._unpacking = [], []
        for bucket, offset in zip(rank_plan.buckets, offsets, strict=True):
            size = bucket.num_elements
            sends.append(arena.view(offset.gather_send, size.gather_send, row_dtype))
            receives.append(arena.view(offset.gather_receive, size.gather_receive, row_dtype))
            sizes = {
                source: sum(route.num_elements for route in routes)
                for source, routes in bucket.receives.items()
            }
            messages.append(BucketMessages(bucket.sends, sizes, bucket.has_gather))
            batch = self._batch(bucket.owned, arena.view(offset.stacks, size.stacks, stack_dtype))
            self._buckets.append(batch)
            # all_to_all_single delivers in the order of sources. Routes are consecutive in
            # messages; a matrix needs them row by row.
            routes = [r for _, routes in sorted(bucket.receives.items()) for r in routes]
            arrived = consecutive_views(routes, receives[-1])
            moves = [(rows, batch.stacks.view(route), 0, 0) for route, rows in arrived]
            self._unpacking.append(RowMoves(moves, self._addresses))
        self._gathers = Exchange(bound.group, messages, sends, receives)
        self._packing = [self.rows.add_read(targets) for targets in self._gathers.packing]
        self._local = [
            self._batch(owned, arena.view(offset, owned.num_elements, stack_dtype))
            for owned, offset in zip(rank_plan.local, local_offsets, strict=True)
        ]

    def _batch(self, owned: OwnedStacks, memory: torch.Tensor) -> _Batch:
        stacks = StackBuffers(owned.stacks, memory)
        tasks = []
        for stack, tensor in stacks.stacks:
            part, index = stack[0], None
            if self.moments is not None and self.moments.by_owner:
                index = self.moments.claim(stack)
            args = NewtonSchulzArgs(
                self._newton_schulz,
                self.plan.matrices[part.matrix].blocks[part.block],
                self.plan.dtypes.normalizes,
                self._parts_groups[part.owners] if len(part.owners) > 1 else None,
            )
            # Chosen once: a step would choose before every stack, on the host.
            backend = BACKENDS[self.plan.backend(part.matrix, part.block)]
            tasks.append(StackTask(tensor, backend, args, part.owners, index))
        kept, staying = (
            [(route, stacks.view(route)) for route in routes]
            for routes in (owned.kept, owned.staying)
        )
        return _Batch(stacks, tasks, self.rows.add_read(kept), self.rows.add_write(staying))

    def _lay_out_scatters(
        self, bound: BoundPlan, rank_plan: RankPlan, offsets: Sequence[BucketSizes], arena: Arena
    ) -> None:
        """View scatters in the arena."""
        dtype = getattr(torch, self.plan.dtypes.scatter_dtype)
        messages, sends, arrived = [], [], []
        for bucket, offset in zip(rank_plan.buckets, offsets, strict=True):
            size, scatter = bucket.num_elements, bucket.scatter
            sends.append(arena.view(offset.scatter_send, size.scatter_send, dtype))
            arrived.append(arena.view(offset.scatter_receive, size.scatter_receive, dtype))
            # It is used: results that all stay belong to local matrices. Replicas may have nothing
            # but messages to themselves, and join all the same.
            messages.append(BucketMessages(scatter.sends, scatter.receives, True))
        self._all_gather = None
        receives = arrived
        if rank_plan.order.has_replicas:
            assert bound.replica_group is not None
            self._all_gather = ReplicaAllGather(bound.replica_group, arrived)
            # The last elements of a section may be unused.
            receives = [
                section[: sum(message.receives.values())]
                for section, message in zip(self._all_gather.own_sections, messages, strict=True)
            ]
        self._scatters = Exchange(bound.group, messages, sends, receives)
        self._arrivals = [
            self.rows.add_write([route_view(r, flat, at) for r, at in bucket.scatter.arrivals])
            for bucket, flat in zip(rank_plan.buckets, arrived, strict=True)
        ]
        self._packing_results = []
        for batch, targets in zip(self._buckets, self._scatters.packing, strict=True):
            moves = [(batch.stacks.view(route), target, 0, 0) for route, target in targets]
            self._packing_results.append(RowMoves(moves, self._addresses))

    @property
    def _tasks(self) -> list[StackTask]:
        return [task for batch in (*self._buckets, *self._local) for task in batch.tasks]

    @property
    def workspace_bytes(self) -> int:
        """Memory that Newton-Schulz and methods need for one stack, at most."""
        return max((task.workspace_bytes for task in self._tasks), default=0)

    def connect(self) -> None:
        """Connect the ranks that will exchange; see ``Engine.connect()``."""
        self._gathers.connect()
        self._scatters.connect()
        if self._all_gather is not None:
            self._all_gather.connect()

    def check_kernels(self) -> None:
        """Check the backends of all shapes; see ``Engine.check_kernels()``."""
        by_shape = {
            (task.backend.name, task.tensor.shape, task.args.whole_shape): task
            for task in self._tasks
        }
        for task in by_shape.values():
            task.check()

    def wait_for_leftovers(self) -> None:
        """Wait for collectives of a step that ended with an exception: they may use the memory."""
        for in_flight in (self._gathering, self._scattering):
            for work in in_flight.values():
                # An all-gather that has not started must not: other ranks may have ended the step.
                wait(work.work if isinstance(work, Later) else work)
            in_flight.clear()

    def local(self, number: int) -> list[Handle]:
        """Orthogonalize a stack of local matrices, and return the rows that are complete."""
        batch = self._local[number]
        self._orthogonalize(batch)
        return self.rows.write(batch.own_results)

    def start_gather(self, number: int) -> None:
        """Pack and send rows."""
        self.rows.read(self._packing[number])
        self._gathering[number] = self._gathers.start(number)

    def wait_for_gather(self, number: int) -> None:
        """Wait for rows; their messages may be written again."""
        wait(self._gathering.pop(number))

    def orthogonalize(self, number: int) -> None:
        """Orthogonalize this rank's stacks of a bucket whose rows have arrived."""
        # Not before the gather has ended: the stacks may share memory with its messages.
        self._unpacking[number].run()
        self._orthogonalize(self._buckets[number])

    def _orthogonalize(self, batch: _Batch) -> None:
        """Replace stacks by their results; the rows of other ranks are in them already."""
        self.rows.read(batch.own_rows)
        for task in batch.tasks:
            task.run()
            if self.watch is not None:
                self.watch(task)
            if self.moments is not None:
                task.apply_method(self.moments.values)

    def start_scatter(self, number: int) -> list[Handle]:
        """Pack and send results.

        Returns:
            Rows that are complete: this rank's own results are written while others are in flight.
        """
        self._packing_results[number].run()
        work = self._scatters.start(number)
        if self._all_gather is None:
            self._scattering[number] = work
        else:
            start = partial(self._all_gather.start, number)
            self._scattering[number] = self._chain.after(work, start)
        return self.rows.write(self._buckets[number].own_results)

    def finish_scatter(self, number: int) -> list[Handle]:
        """Wait for results, write them, and return the rows that are complete."""
        wait(self._scattering.pop(number))
        return self.rows.write(self._arrivals[number])
