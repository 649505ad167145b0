# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run an exchange plan: local rows in, orthogonalized local rows out.

The order of a step, for buckets 0, 1, 2, ...::

    norms | gather 0 | local | gather 1 | orthogonalize 0 |           scatter 0
                     | local | gather 2 | orthogonalize 1 | yield 0 | scatter 1
                     | local | gather 3 | orthogonalize 2 | yield 1 | scatter 2 | ...

Gathers and scatters are launched asynchronously: those of bucket i + 1 and i - 1 travel while
bucket i is orthogonalized. Local matrices, of which nothing travels, fill the buckets in which a
rank has less to do than others, while the gather of the bucket travels.

The gather of bucket i + 1 starts when that of bucket i has arrived. Earlier, both would need memory
for what they send. The price: where local matrices take longer than a gather, the link is idle
meanwhile.

Over NCCL collectives run on the process group's own stream, and waiting for them is an event: the
host never waits. Over gloo they run on its threads.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.backend import Backend, Call
from megatron_muon.newton_schulz.registry import BACKENDS, check_against_reference
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import RankPlan
from megatron_muon.plan.routes import Part
from megatron_muon.plan.staging import StagingLayout
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.exchange import BucketMessages, Exchange
from megatron_muon.runtime.local_rows import LocalRows, Rows
from megatron_muon.runtime.stacks import OwnStacks


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
        without padding. Owners of a split matrix also exchange n x n matrices in Newton-Schulz, n
        the shorter side, as often as its backend says, and all-reduce its norm where rows travel in
        fp32.
    Memory: :attr:`staging_bytes` while a step runs, laid out by
        :class:`~megatron_muon.plan.staging.StagingLayout`; beside it the results of one bucket, and
        what Newton-Schulz needs for one stack. Between steps a few bytes a block.
    """

    plan: ExchangePlan
    _arena: Arena
    _gathers: Exchange  # rows, in the gather dtype
    _scatters: Exchange  # results, in the scatter dtype
    _buckets: list[OwnStacks]
    # Stacks of local matrices, by the bucket whose time they fill.
    _local: list[list[OwnStacks]]
    _backends: dict[tuple[int, int], Backend]  # by matrix and block
    _rows: LocalRows

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
        self._parts_groups = parts_groups
        self._rows = LocalRows(
            plan, newton_schulz, parameters, rank=rank, group=group, device=device
        )
        rank_plan = RankPlan.build(plan, rank)
        layout = rank_plan.staging(plan.wire)
        self._arena = Arena(layout.num_bytes, device)
        self._lay_out(rank_plan, layout, group)
        # Chosen once: in a step the host would choose in front of every stack.
        self._backends = {
            (part.matrix, part.block): BACKENDS[plan.backend(part.matrix, part.block)]
            for stacks in (*self._buckets, *(each for local in self._local for each in local))
            for stack, _ in stacks.stacks
            for part in stack
        }
        # Nothing is kept between steps.
        self._arena.free()

    def _lay_out(
        self, rank_plan: RankPlan, layout: StagingLayout, group: dist.ProcessGroup | None
    ) -> None:
        """View messages and stacks in the arena."""
        row_dtype = getattr(torch, self.plan.wire.gather_dtype)
        result_dtype = getattr(torch, self.plan.wire.scatter_dtype)
        view = self._arena.view
        sizes = [bucket.num_elements for bucket in rank_plan.buckets]
        places = list(zip(layout.buckets, sizes, strict=True))
        self._gathers = Exchange(
            group,
            [
                BucketMessages(bucket.gather_sends, bucket.gather_receives, bucket.has_gather)
                for bucket in rank_plan.buckets
            ],
            [view(at.gather_send, size.gather_send, row_dtype) for at, size in places],
            [view(at.gather_receive, size.gather_receive, row_dtype) for at, size in places],
        )
        self._scatters = Exchange(
            group,
            # Something always travels back: otherwise the matrix would be local.
            [
                BucketMessages(bucket.scatter_sends, bucket.scatter_receives, True)
                for bucket in rank_plan.buckets
            ],
            [view(at.scatter_send, size.scatter_send, result_dtype) for at, size in places],
            [view(at.scatter_receive, size.scatter_receive, result_dtype) for at, size in places],
        )
        self._buckets = [
            OwnStacks(bucket.owned, view(at.stacks, size.stacks, row_dtype))
            for bucket, (at, size) in zip(rank_plan.buckets, places, strict=True)
        ]
        self._local = [
            [OwnStacks(owned, view(at, owned.num_elements, row_dtype)) for owned in stacks]
            for stacks, at in zip(rank_plan.local, layout.local, strict=True)
        ]

    def connect(self) -> None:
        """Connect the ranks that will exchange; called on all ranks of the group together.

        Otherwise they connect in the first step, whose time then says nothing, and what fails there
        fails after hours of loading. NCCL connects two ranks when they first send to each other,
        and takes memory for it.

        Communication: one element from each rank to each that it will send to, in two collectives.
        """
        self._gathers.connect()
        self._scatters.connect()

    def check_kernels(self) -> None:
        """Compare backends that have kernels of their own with those that torch computes.

        It also compiles the kernels: otherwise the first step would wait for it.

        Raises:
            RuntimeError: A kernel's results are wrong for a shape, or it fails.

        Communication: none, but for kernels that communicate.
        Memory: one stack, and what Newton-Schulz needs for it twice, until it returns.
        """
        own_stacks = (*self._buckets, *(each for local in self._local for each in local))
        stacks = [each for own in own_stacks for each in own.stacks]
        backends = [self._backends[stack[0].matrix, stack[0].block] for stack, _ in stacks]
        # By owners: a rank may be in several groups, and all must connect them in one order.
        for owners, name in sorted(
            {
                (stack[0].owners, backend.name)
                for (stack, _), backend in zip(stacks, backends, strict=True)
                if len(stack[0].owners) > 1
            }
        ):
            BACKENDS[name].connect(self._parts_groups[owners])
        checked, problems = set(), []
        for (stack, tensor), backend in zip(stacks, backends, strict=True):
            call = self._call(stack[0])
            # Alone where it can be: a rank whose kernel fails must not leave others waiting.
            if not backend.communicates:
                call = dataclasses.replace(call, parts_group=None)
            key = backend.name, tensor.shape, call.whole_shape, call.parts_group
            if backend.reference is None or key in checked:
                continue
            checked.add(key)
            try:
                check_against_reference(backend, tensor, call)
            except RuntimeError as error:
                problems.append(str(error))
        # At the end: the other owners of a split matrix wait for this rank in its next check.
        if problems:
            raise RuntimeError(problems[0])

    def _call(self, part: Part) -> Call:
        """Return what a stack of such parts is orthogonalized as."""
        return Call(
            self._newton_schulz,
            self.plan.matrices[part.matrix].blocks[part.block],
            self.plan.wire.normalizes,
            self._parts_groups[part.owners] if len(part.owners) > 1 else None,
        )

    @property
    def staging_bytes(self) -> int:
        """Memory of messages and stacks while a step runs, bytes."""
        return self._arena.num_bytes

    @torch.no_grad()
    def orthogonalize(self, momentum: Rows, results: Rows) -> Iterator[list[torch.Tensor]]:
        """Orthogonalize all matrices, and yield parameters as their results arrive.

        The caller must exhaust the iterator: every rank joins the collectives of all buckets.
        Nothing is sent before the first item is asked for.

        Args:
            momentum: By parameter, this rank's rows of what is orthogonalized, ``(local_rows,
                cols)`` float32. They must stay as they are until the parameter is yielded.
            results: By parameter, where its rows of the scaled result are written, of the same
                shape and dtype. It may be the momentum's own memory: all rows of a parameter have
                been read when its first result comes.

        Yields:
            Lists of parameters whose results are complete. Each parameter of which this rank holds
            rows is yielded once.
        """
        # Before anything is sent: a rank without memory ends before it has joined a collective.
        self._arena.allocate()
        self._rows.begin(momentum, results)
        num_buckets = len(self._buckets)
        gathering = self._start_gather(0) if num_buckets else None
        if not num_buckets:
            yield from self._orthogonalize_local(0)
        scattering: dist.Work | None = None
        for index in range(num_buckets):
            yield from self._orthogonalize_local(index)
            if gathering is not None:
                gathering.wait()
            gathering = self._start_gather(index + 1) if index + 1 < num_buckets else None
            orthogonal = self._orthogonalize_gathered(index)
            # The results of the bucket before are only waited for now: they had all of this
            # bucket's Newton-Schulz to travel. Their memory may serve this bucket's results.
            if index:
                yield self._finish(index - 1, scattering)
            scattering = self._start_scatter(index, orthogonal)
            # What stays here is written while the rest travels.
            yield self._write_kept(self._buckets[index], orthogonal)
            del orthogonal  # not alive while the next bucket is orthogonalized
        if num_buckets:
            yield self._finish(num_buckets - 1, scattering)
        # Not after an exception: a collective that was not waited for may still use the memory.
        self._arena.free()
        self._rows.end()

    def _orthogonalize_local(self, index: int) -> Iterator[list[torch.Tensor]]:
        """Orthogonalize the local matrices that fill a bucket's time, stack by stack."""
        # One stack after the other: they lie in one place, and each is written back before the next
        # is read.
        for stacks in self._local[index]:
            self._rows.read([(route, stacks.place(route)) for route in stacks.kept])
            yield self._write_kept(stacks, self._orthogonalize(stacks))

    def _start_gather(self, index: int) -> dist.Work | None:
        self._rows.read(self._gathers.packing(index))
        return self._gathers.start(index)

    def _orthogonalize_gathered(self, index: int) -> list[torch.Tensor]:
        """Orthogonalize what this rank owns of a bucket whose rows have arrived."""
        stacks = self._buckets[index]
        arrived = self._gathers.unpacking(index)
        if arrived:
            # Messages hold routes one behind the other; a matrix needs them row by row.
            torch._foreach_copy_(
                [stacks.place(route) for route, _ in arrived], [sent for _, sent in arrived]
            )
        # Not with the gather, though they are here: the stacks may lie where its messages were.
        self._rows.read([(route, stacks.place(route)) for route in stacks.kept])
        # Results of tall matrices are transposed views. Made dense here, once, one fused kernel
        # copies their rows into messages; strided rows would take a kernel each.
        return [result.contiguous() for result in self._orthogonalize(stacks)]

    def _orthogonalize(self, stacks: OwnStacks) -> list[torch.Tensor]:
        """Return one tensor for each stack, in new memory."""
        results = []
        for stack, tensor in stacks.stacks:
            part = stack[0]
            backend = self._backends[part.matrix, part.block]
            results.append(backend.run(tensor, self._call(part)))
        return results

    def _start_scatter(self, index: int, results: Sequence[torch.Tensor]) -> dist.Work | None:
        stacks, packing = self._buckets[index], self._scatters.packing(index)
        if packing:
            torch._foreach_copy_(
                [target for _, target in packing],
                [stacks.result(results, route) for route, _ in packing],
            )
        return self._scatters.start(index)

    def _write_kept(self, stacks: OwnStacks, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write the results that stay on this rank."""
        return self._rows.write([(route, stacks.result(results, route)) for route in stacks.kept])

    def _finish(self, index: int, scattering: dist.Work | None) -> list[torch.Tensor]:
        """Wait for the results of a bucket, and write them."""
        if scattering is not None:
            scattering.wait()
        return self._rows.write(self._scatters.unpacking(index))
