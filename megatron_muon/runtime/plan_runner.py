# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run one plan on this rank: what every action of a step does with a bucket."""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import profiler

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings, StackMethod
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import RankPlan
from megatron_muon.plan.routes import Part
from megatron_muon.plan.staging import PlanOffsets
from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.exchange import (
    BucketMessages,
    Chain,
    Exchange,
    Later,
    ReplicaAllGather,
    Waitable,
    consecutive_views,
    route_view,
)
from megatron_muon.runtime.local_rows import Handle, LocalRows, Rows, StackBuffers, StackTask
from megatron_muon.runtime.norms import Moments
from megatron_muon.runtime.row_moves import RowMoves


def in_range[**P, R](name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that shows calls of a function as ``Muon.NAME`` in profiles.

    ``torch.profiler`` and ``torch.autograd.profiler.emit_nvtx``, for Nsight Systems, set the flag.
    ``record_function`` itself does not ask: it would call into torch in every step.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Wrap the function."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            """Call it, in a range while a profiler runs."""
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"Muon.{name}"):
                return function(*args, **kwargs)

        return call

    return decorate


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


class _Owned(NamedTuple):
    """What this rank orthogonalizes at once.

    Args:
        stacks: Views of its routes.
        work: The stacks.
        kept: Number of the read of the rows that are here already.
        staying: Number of the write of the results that stay here.
    """

    stacks: StackBuffers
    work: list[StackTask]
    kept: int
    staying: int


class PlanRunner:
    """Gather, orthogonalize and scatter the buckets of one plan, in an arena.

    Args:
        bound: The plan.
        rank_plan: This rank's part of it.
        places: Offsets of the buffers of all buckets and scatters in the arena.
        local_places: Offsets of the stacks of local matrices.
        newton_schulz: Steps, coefficients, precision and scale.
        arena: Memory of a step.
        chain: Starts the all-gathers of replicas.
        rank: This rank of the job.
        device: Where messages and stacks are.
        rows_device: See :class:`~megatron_muon.runtime.engine.Engine`.

    Communication: see :class:`~megatron_muon.runtime.engine.Engine`.
    """

    plan: ExchangePlan
    moments: Moments | None  # of a method
    watch: Callable[[StackTask], None] | None = None  # given each stack of results
    _gathers: Exchange  # rows, in the gather dtype
    _scatters: Exchange  # results, in the scatter dtype
    _all_gather: ReplicaAllGather | None  # results, between replicas
    _rows: LocalRows
    _buckets: list[_Owned]
    _local: list[_Owned]
    # By bucket, rows to messages, and messages to stacks.
    _packing: list[int]
    _unpacking: list[RowMoves]
    # By scatter, results to messages, and messages to rows.
    _packing_results: list[RowMoves]
    _arrivals: list[int]
    # What is in flight, by gather and by scatter; None if nothing is sent. With replicas a scatter
    # is in flight until its all-gather has ended.
    _gathering: dict[int, Waitable | None]
    _scattering: dict[int, Waitable | None]

    def __init__(
        self,
        bound: BoundPlan,
        rank_plan: RankPlan,
        places: PlanOffsets,
        local_places: Sequence[int],
        newton_schulz: NewtonSchulzSettings,
        arena: Arena,
        chain: Chain,
        *,
        rank: int,
        device: torch.device,
        rows_device: torch.device | None = None,
    ) -> None:
        self.plan = bound.plan
        self._parts_groups = bound.parts_groups
        self._newton_schulz = newton_schulz
        self._chain = chain
        method = newton_schulz.method
        self.moments = None
        if method is not None:
            self.moments = Moments(
                self.plan.matrices,
                method.state_shape,
                bound.group,
                device,
                by_owner=isinstance(method, StackMethod),
            )
        self._rows = LocalRows(
            self.plan,
            newton_schulz,
            bound.handles,
            self.moments,
            rank=rank,
            group=bound.group,
            device=device,
            rows_device=rows_device,
        )
        self.norms = self._rows.norms
        self._device = device
        self._lay_out(bound, rank_plan, places, local_places, arena)
        self._lay_out_scatters(bound, rank_plan, places, arena)
        self._gathering, self._scattering = {}, {}

    def _lay_out(
        self,
        bound: BoundPlan,
        rank_plan: RankPlan,
        places: PlanOffsets,
        local_places: Sequence[int],
        arena: Arena,
    ) -> None:
        """View gathers and stacks in the arena."""
        row_dtype = getattr(torch, self.plan.dtypes.gather_dtype)
        stack_dtype = getattr(torch, self.plan.dtypes.stack_dtype)
        view = arena.view
        sizes = [bucket.num_elements for bucket in rank_plan.buckets]
        found = list(zip(places.buckets, sizes, strict=True))
        receives = [view(at.gather_receive, size.gather_receive, row_dtype) for at, size in found]
        sends = [view(at.gather_send, size.gather_send, row_dtype) for at, size in found]
        messages = []
        arrived = []
        for bucket, received in zip(rank_plan.buckets, receives, strict=True):
            by_source = {
                source: sum(route.num_elements for route in routes)
                for source, routes in bucket.receives.items()
            }
            messages.append(BucketMessages(bucket.sends, by_source, bucket.has_gather))
            # By source: that is the order in which all_to_all_single delivers.
            routes = [r for _, routes in sorted(bucket.receives.items()) for r in routes]
            arrived.append(consecutive_views(routes, received))
        self._gathers = Exchange(bound.group, messages, sends, receives)
        self._buckets = [
            self._own(StackBuffers(bucket.owned, view(at.stacks, size.stacks, stack_dtype)))
            for bucket, (at, size) in zip(rank_plan.buckets, found, strict=True)
        ]
        self._local = [
            self._own(StackBuffers(owned, view(at, owned.num_elements, stack_dtype)))
            for owned, at in zip(rank_plan.local, local_places, strict=True)
        ]
        self._packing = [
            self._rows.add_read(self._gathers.packing(number)) for number, _ in enumerate(found)
        ]
        self._unpacking = [
            # Routes are consecutive in messages; a matrix needs them row by row.
            RowMoves([(rows, owned.stacks.view(r)) for r, rows in received], device=self._device)
            for owned, received in zip(self._buckets, arrived, strict=True)
        ]

    def _own(self, stacks: StackBuffers) -> _Owned:
        """Prepare what is orthogonalized at once."""
        kept, staying = (
            [(route, stacks.view(route)) for route in routes]
            for routes in (stacks.kept, stacks.staying)
        )
        work = [
            # Chosen once: a step would choose before every stack, on the host.
            StackTask(
                tensor,
                BACKENDS[self.plan.backend(stack[0].matrix, stack[0].block)],
                self._args_of(stack[0]),
                stack[0].owners,
                self.moments.claim(stack)
                if self.moments is not None and self.moments.by_owner
                else None,
            )
            for stack, tensor in stacks.stacks
        ]
        return _Owned(stacks, work, self._rows.add_read(kept), self._rows.add_write(staying))

    def _lay_out_scatters(
        self, bound: BoundPlan, rank_plan: RankPlan, places: PlanOffsets, arena: Arena
    ) -> None:
        """View scatters in the arena."""
        dtype = getattr(torch, self.plan.dtypes.scatter_dtype)
        scatters = rank_plan.scatters
        sizes = [scatter.num_elements for scatter in scatters]
        found = list(zip(places.scatters, sizes, strict=True))
        sends = [arena.view(at.send, size.send, dtype) for at, size in found]
        arrived = [arena.view(at.receive, size.receive, dtype) for at, size in found]
        self._all_gather = None
        receives = arrived
        if rank_plan.order.has_replicas:
            assert bound.replica_group is not None
            self._all_gather = ReplicaAllGather(bound.replica_group, arrived)
            # The last elements of a chunk may be unused.
            receives = [
                self._all_gather.own_chunk(number)[: sum(scatter.receives.values())]
                for number, scatter in enumerate(scatters)
            ]
        # Something is sent back: otherwise the matrix would be local. Replicas may have nothing but
        # messages to themselves, and join all the same.
        messages = [BucketMessages(each.sends, each.receives, True) for each in scatters]
        self._scatters = Exchange(bound.group, messages, sends, receives)
        self._arrivals = [
            self._rows.add_write([route_view(r, flat, offset) for r, offset in scatter.arrivals])
            for scatter, flat in zip(scatters, arrived, strict=True)
        ]
        self._packing_results = [
            RowMoves(
                [
                    (self._buckets[number // self.plan.num_scatters].stacks.view(route), target)
                    for route, target in self._scatters.packing(number)
                ],
                device=self._device,
            )
            for number, _ in enumerate(scatters)
        ]

    @property
    def workspace_bytes(self) -> int:
        """Memory that Newton-Schulz and methods need for one stack, at most."""
        work = (each for owned in (*self._buckets, *self._local) for each in owned.work)
        return max((each.workspace_bytes for each in work), default=0)

    def connect(self) -> None:
        """Connect the ranks that will exchange; see :meth:`Engine.connect`."""
        self._gathers.connect()
        self._scatters.connect()
        if self._all_gather is not None:
            self._all_gather.connect()

    def check_kernels(self) -> list[str]:
        """List the kernels that fail; see :meth:`Engine.check_kernels`."""
        work = [each for owned in (*self._buckets, *self._local) for each in owned.work]
        # By owners: a rank may be in several groups, and all must connect them in one order.
        connections = sorted(
            {(each.owners, each.backend.name) for each in work if len(each.owners) > 1}
        )
        problems: list[str] = []
        for owners, name in connections:
            _attempt(problems, partial(BACKENDS[name].connect, self._parts_groups[owners]))
        checked = set()
        for stack in work:
            backend, args = stack.backend, stack.args
            parts_group = args.parts_group if backend.communicates else None
            key = backend.name, stack.tensor.shape, args.whole_shape, parts_group
            if backend.reference is not None and key not in checked:
                checked.add(key)
                _attempt(problems, stack.check)
        return problems

    def _args_of(self, part: Part) -> NewtonSchulzArgs:
        """Return the arguments of a stack of such parts."""
        return NewtonSchulzArgs(
            self._newton_schulz,
            self.plan.matrices[part.matrix].blocks[part.block],
            self.plan.dtypes.normalizes,
            self._parts_groups[part.owners] if len(part.owners) > 1 else None,
        )

    @in_range("norms")
    def begin(self, updates: Rows, results: Rows) -> None:
        """Set the rows of a step, and reduce their norms."""
        self._rows.begin(updates, results)

    def wait_for_leftovers(self) -> None:
        """Wait for collectives of a step that ended with an exception: they may use the memory."""
        for under_way in (self._gathering, self._scattering):
            for work in under_way.values():
                # One that has not started must not: other ranks may have ended their step.
                _wait(work.work if isinstance(work, Later) else work)
            under_way.clear()

    def end(self) -> None:
        """End a step; see :meth:`Moments.share`."""
        if self.moments is not None:
            self.moments.share()

    def forget(self) -> None:
        """Drop the rows, which are memory of the caller's."""
        self._rows.forget()

    @in_range("local_matrices")
    def local(self, number: int) -> list[Handle]:
        """Orthogonalize a stack of local matrices, and return the rows that are complete."""
        owned = self._local[number]
        self._orthogonalize(owned)
        return self._rows.write(owned.staying)

    @in_range("start_gather")
    def start_gather(self, number: int) -> None:
        """Pack and send rows."""
        self._rows.read(self._packing[number])
        self._gathering[number] = self._gathers.start(number)

    @in_range("wait_for_gather")
    def wait_for_gather(self, number: int) -> None:
        """Wait for rows; their messages may be written again."""
        _wait(self._gathering.pop(number))

    @in_range("orthogonalize")
    def orthogonalize(self, number: int) -> None:
        """Orthogonalize what this rank owns of a bucket whose rows have arrived."""
        # Not before the gather has ended: the stacks may share memory with its messages.
        self._unpacking[number].run()
        self._orthogonalize(self._buckets[number])

    def _orthogonalize(self, owned: _Owned) -> None:
        """Replace stacks by their results, once the rows of other ranks are there."""
        self._rows.read(owned.kept)
        for stack in owned.work:
            stack.run()
            if self.watch is not None:
                self.watch(stack)
            if self.moments is not None:
                stack.change(self.moments.values)

    @in_range("start_scatter")
    def start_scatter(self, number: int) -> list[Handle]:
        """Pack and send results.

        Returns:
            Rows that are complete: what stays here is written while the rest is in flight.
        """
        bucket, position = divmod(number, self.plan.num_scatters)
        self._packing_results[number].run()
        work = self._scatters.start(number)
        if self._all_gather is None:
            self._scattering[number] = work
        else:
            self._scattering[number] = self._chain.after(
                work, partial(self._all_gather.start, number)
            )
        if position < self.plan.num_scatters - 1:
            return []
        return self._rows.write(self._buckets[bucket].staying)

    @in_range("finish_scatter")
    def finish_scatter(self, number: int) -> list[Handle]:
        """Wait for results, write them, and return the rows that are complete."""
        _wait(self._scattering.pop(number))
        return self._rows.write(self._arrivals[number])


def _wait(work: Waitable | None) -> None:
    if work is not None:
        work.wait()


def _attempt(problems: list[str], call: Callable[[], None]) -> None:
    """Call a function, and record its exception: other ranks wait for what comes after it."""
    try:
        call()
    # Kernels of others raise whatever their compilers do.
    except Exception as error:
        problems.append(first_line(error))
