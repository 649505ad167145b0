# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run one plan on this rank: what every action of a step does with a bucket."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.backend import Backend
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.registry import BACKENDS, check_against_reference
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import RankPlan
from megatron_muon.plan.routes import Part
from megatron_muon.plan.staging import PlanOffsets
from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.chained_collectives import CollectiveChain, Waitable
from megatron_muon.runtime.exchange import (
    BucketMessages,
    Exchange,
    ReplicaAllGather,
    RouteView,
    consecutive_views,
    route_view,
)
from megatron_muon.runtime.local_rows import Handle, LocalRows, Rows
from megatron_muon.runtime.stacks import StackBuffers


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
        device: Where shards are.

    Communication: see :class:`~megatron_muon.runtime.engine.Engine`.
    """

    plan: ExchangePlan
    _gathers: Exchange  # rows, in the gather dtype
    _scatters: Exchange  # results, in the scatter dtype
    _all_gather: ReplicaAllGather | None  # results, between replicas
    _arrivals: list[list[RouteView]]  # results for this rank's rows, by scatter
    _arrived_rows: list[list[RouteView]]  # of what this rank owns, by bucket
    _buckets: list[StackBuffers]
    _local: list[StackBuffers]
    _backends: dict[tuple[int, int], Backend]  # by matrix and block
    _rows: LocalRows
    _results: Sequence[torch.Tensor]  # of the stacks of the bucket in work
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
        chain: CollectiveChain,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self.plan = bound.plan
        self._parts_groups = bound.parts_groups
        self._newton_schulz = newton_schulz
        self._chain = chain
        self._rows = LocalRows(
            self.plan,
            newton_schulz,
            bound.handles,
            rank_plan.num_results(),
            rank=rank,
            group=bound.group,
            device=device,
        )
        self._lay_out(bound, rank_plan, places, local_places, arena)
        self._lay_out_scatters(bound, rank_plan, places, arena)
        # Chosen once: a step would choose before every stack, on the host.
        self._backends = {
            (part.matrix, part.block): BACKENDS[self.plan.backend(part.matrix, part.block)]
            for stacks in (*self._buckets, *self._local)
            for stack, _ in stacks.stacks
            for part in stack
        }
        self._results = ()
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
        row_dtype = getattr(torch, self.plan.wire.gather_dtype)
        view = arena.view
        sizes = [bucket.num_elements for bucket in rank_plan.buckets]
        found = list(zip(places.buckets, sizes, strict=True))
        receives = [view(at.gather_receive, size.gather_receive, row_dtype) for at, size in found]
        sends = [view(at.gather_send, size.gather_send, row_dtype) for at, size in found]
        messages = []
        self._arrived_rows = []
        for bucket, received in zip(rank_plan.buckets, receives, strict=True):
            by_source = {
                source: sum(route.num_elements for route in routes)
                for source, routes in bucket.receives.items()
            }
            messages.append(BucketMessages(bucket.sends, by_source, bucket.has_gather))
            # By source: that is the order in which all_to_all_single delivers.
            routes = [r for _, routes in sorted(bucket.receives.items()) for r in routes]
            self._arrived_rows.append(consecutive_views(routes, received))
        self._gathers = Exchange(bound.group, messages, sends, receives)
        self._buckets = [
            StackBuffers(bucket.owned, view(at.stacks, size.stacks, row_dtype))
            for bucket, (at, size) in zip(rank_plan.buckets, found, strict=True)
        ]
        self._local = [
            StackBuffers(owned, view(at, owned.num_elements, row_dtype))
            for owned, at in zip(rank_plan.local, local_places, strict=True)
        ]

    def _lay_out_scatters(
        self, bound: BoundPlan, rank_plan: RankPlan, places: PlanOffsets, arena: Arena
    ) -> None:
        """View scatters in the arena."""
        dtype = getattr(torch, self.plan.wire.scatter_dtype)
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
            [route_view(route, flat, offset) for route, offset in scatter.arrivals]
            for scatter, flat in zip(scatters, arrived, strict=True)
        ]

    def connect(self) -> None:
        """Connect the ranks that will exchange; see :meth:`Engine.connect`."""
        self._gathers.connect()
        self._scatters.connect()
        if self._all_gather is not None:
            self._all_gather.connect()

    def check_kernels(self) -> list[str]:
        """List the kernels that fail; see :meth:`Engine.check_kernels`."""
        stacks = [each for own in (*self._buckets, *self._local) for each in own.stacks]
        backends = [self._backends[stack[0].matrix, stack[0].block] for stack, _ in stacks]
        # By owners: a rank may be in several groups, and all must connect them in one order.
        connections = sorted(
            {
                (stack[0].owners, backend.name)
                for (stack, _), backend in zip(stacks, backends, strict=True)
                if len(stack[0].owners) > 1
            }
        )
        problems: list[str] = []
        for owners, name in connections:
            _attempt(problems, partial(BACKENDS[name].connect, self._parts_groups[owners]))
        checked = set()
        for (stack, tensor), backend in zip(stacks, backends, strict=True):
            call = self._call(stack[0])
            # On this rank alone if possible: if its kernel fails, others must not wait for it.
            if not backend.communicates:
                call = dataclasses.replace(call, parts_group=None)
            key = backend.name, tensor.shape, call.whole_shape, call.parts_group
            if backend.reference is not None and key not in checked:
                checked.add(key)
                _attempt(problems, partial(check_against_reference, backend, tensor, call))
        return problems

    def _call(self, part: Part) -> Call:
        """Return how a stack of such parts is orthogonalized."""
        return Call(
            self._newton_schulz,
            self.plan.matrices[part.matrix].blocks[part.block],
            self.plan.wire.normalizes,
            self._parts_groups[part.owners] if len(part.owners) > 1 else None,
        )

    def begin(self, momentum: Rows, results: Rows) -> None:
        """Set the rows of a step, and reduce their norms."""
        self._rows.begin(momentum, results)

    def wait_for_leftovers(self) -> None:
        """Wait for collectives of a step that ended with an exception: they may use the memory."""
        for under_way in (self._gathering, self._scattering):
            for work in under_way.values():
                _wait(work)
            under_way.clear()
        self._results = ()

    def end(self) -> None:
        """Drop the rows, which may be memory of the caller's."""
        self._rows.end()

    def orthogonalize_local(self, number: int) -> list[Handle]:
        """Orthogonalize a stack of local matrices, and return the rows that are complete."""
        stacks = self._local[number]
        self._rows.read([(route, stacks.view(route)) for route in stacks.kept])
        return self._write_staying(stacks, self._orthogonalize(stacks))

    def start_gather(self, number: int) -> None:
        """Pack and send rows."""
        self._rows.read(self._gathers.packing(number))
        self._gathering[number] = self._gathers.start(number)

    def wait_for_gather(self, number: int) -> None:
        """Wait for rows; their messages may be written again."""
        _wait(self._gathering.pop(number))

    def orthogonalize(self, number: int) -> None:
        """Orthogonalize what this rank owns of a bucket whose rows have arrived."""
        stacks, arrived = self._buckets[number], self._arrived_rows[number]
        if arrived:
            # Routes are consecutive in messages; a matrix needs them row by row.
            torch._foreach_copy_(
                [stacks.view(route) for route, _ in arrived], [sent for _, sent in arrived]
            )
        # Not before the gather has ended: the stacks may share memory with its messages.
        self._rows.read([(route, stacks.view(route)) for route in stacks.kept])
        # Results of tall matrices are transposed views. Made contiguous here, one fused kernel
        # copies their rows into messages; strided rows would need one kernel per route.
        self._results = [result.contiguous() for result in self._orthogonalize(stacks)]

    def _orthogonalize(self, stacks: StackBuffers) -> list[torch.Tensor]:
        """Return one tensor per stack, in new memory."""
        results = []
        for stack, tensor in stacks.stacks:
            part = stack[0]
            backend = self._backends[part.matrix, part.block]
            results.append(backend.run(tensor, self._call(part)))
        return results

    def start_scatter(self, number: int) -> list[Handle]:
        """Pack and send results.

        Returns:
            Rows that are complete: what stays here is written while the rest is in flight.
        """
        bucket, position = divmod(number, self.plan.num_scatters)
        stacks, packing = self._buckets[bucket], self._scatters.packing(number)
        if packing:
            torch._foreach_copy_(
                [target for _, target in packing],
                [stacks.result(self._results, route) for route, _ in packing],
            )
        work = self._scatters.start(number)
        if self._all_gather is None:
            self._scattering[number] = work
        else:
            self._scattering[number] = self._chain.after(
                work, partial(self._all_gather.start, number)
            )
        if position < self.plan.num_scatters - 1:
            return []
        # The last scatter of the bucket: its results have left, or are written now.
        results, self._results = self._results, ()
        return self._write_staying(stacks, results)

    def finish_scatter(self, number: int) -> list[Handle]:
        """Wait for results, write them, and return the rows that are complete."""
        _wait(self._scattering.pop(number))
        return self._rows.write(self._arrivals[number])

    def _write_staying(self, stacks: StackBuffers, results: Sequence[torch.Tensor]) -> list[Handle]:
        """Write the results that are not sent."""
        return self._rows.write([(r, stacks.result(results, r)) for r in stacks.staying])


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
