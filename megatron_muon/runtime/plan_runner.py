# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run one plan on this rank: the actions of a step on one bucket."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import profiler

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import MatrixLayout, Ranks
from megatron_muon.plan.rank_plan import TABLES, Message, RankBucket, RankPlan
from megatron_muon.plan.routes import Part, Stack, stack_elements
from megatron_muon.plan.staging import BucketSizes
from megatron_muon.runtime.agreement import Domain
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.exchange import AllToAll, Chain, Sections, connect, wait
from megatron_muon.runtime.norms import BlockNorms
from megatron_muon.runtime.row_moves import Handle, RowMoves, Side, Tensors
from megatron_muon.runtime.stack_task import StackTask


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Show the body as ``Muon.NAME`` in profiles.

    ``torch.profiler`` and ``torch.autograd.profiler.emit_nvtx``, for Nsight Systems, set the flag.
    ``record_function`` itself does not ask: it would call into torch in every step.
    """
    if profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"Muon.{name}")
    return nullcontext()


class PlanInput(NamedTuple):
    """Matrices of one domain with the same replicas, which share a plan.

    Args:
        domain: The ranks that exchange them.
        matrices: All of them, in the same order on all ranks of the domain.
        handles: By index of a matrix with rows on this rank, ascending, the handle by which
            ``Engine.orthogonalize()`` takes and yields these rows.
        replica_group: Ranks with this rank's rows; None if there are no others.
        params: By index of a matrix, the parameter that it belongs to, if this rank has it. State
            of an owner is kept with the parameter.
    """

    domain: Domain
    matrices: Sequence[MatrixLayout]
    handles: Mapping[int, Any]
    replica_group: dist.ProcessGroup | None
    params: Sequence[torch.Tensor | None] = ()


class _Bucket(NamedTuple):
    """A bucket in memory, or a stack of local matrices; see ``RankBucket``.

    Args:
        tasks: By stack, its orthogonalization.
        gather: Message of rows; None if no rank sends any.
        scatter: Message of results; None for a rank alone.
        sections: Results that replicas pass on; None without replicas.
        moves: Moves by name of their table.
    """

    tasks: list[StackTask]
    gather: AllToAll | None
    scatter: AllToAll | None
    sections: Sections | None
    moves: dict[str, RowMoves]


class PlanRunner:
    """Gather, orthogonalize and scatter the buckets of one plan, in an arena.

    Methods with the names of actions run them, and return handles of rows that are complete.

    Args:
        plan: The plan.
        plan_input: Process groups of this rank.
        rank_plan: This rank's part of the plan.
        offsets: Offsets of buffers in the arena, of buckets and then of local stacks.
        shards: Sides of the shards of updates, and of results.
        newton_schulz: Steps, coefficients, precision and scale.
        parts_groups: The process groups of the sets of owners that this rank belongs to.
        arena: Memory of a step.
        chain: Starts the all-gathers of replicas.
        tensors: The arena and all shards.

    Attributes:
        plan: The plan.
        norms: Norms of blocks.
        buckets: All buckets, then stacks of local matrices.
        in_flight: Collectives that have not been waited for, by kind and bucket; None if nothing is
            sent. With replicas a scatter is in flight until its all-gather has ended.

    Communication: see ``Engine``.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        plan_input: PlanInput,
        rank_plan: RankPlan,
        offsets: Sequence[BucketSizes],
        shards: tuple[Side, Side],
        newton_schulz: NewtonSchulzSettings,
        parts_groups: Mapping[Ranks, dist.ProcessGroup],
        arena: Arena,
        chain: Chain,
        tensors: Tensors,
    ) -> None:
        self.plan = plan
        self._group, self._replica_group = plan_input.domain.group, plan_input.replica_group
        self._newton_schulz, self._parts_groups = newton_schulz, parts_groups
        self._arena, self._chain, self._tensors, self._shards = arena, chain, tensors, shards
        # Without buckets all matrices are local: a rank reads no norms but its own.
        group = self._group if plan.buckets else None
        self.norms = BlockNorms(plan, group, tensors.device, tensors.rows_device)
        # Query, key and value have factors of their own.
        self._factors = [
            newton_schulz.scale(*(shape[::-1] if matrix.is_transposed else shape))
            for matrix in plan.matrices
            for shape in matrix.blocks
        ]
        self.in_flight: dict[tuple[str, int], dist.Work | None] = {}
        self._params = plan_input.params
        self.buckets = list(map(self._bucket, (*rank_plan.buckets, *rank_plan.local), offsets))

    def _bucket(self, bucket: RankBucket, offsets: BucketSizes) -> _Bucket:
        """Lay out a bucket in the arena."""
        dtypes = [getattr(torch, name) for name in self.plan.dtypes.of_buffers]
        memory = list(map(self._arena.view, offsets, bucket.num_elements, dtypes))
        gather_send, gather_receive, stacks, scatter_send, scatter_receive = memory
        sides = dict(zip(BucketSizes._fields, map(Side, dtypes, [0] * 5, offsets), strict=True))
        sides["updates"], sides["results"] = self._shards
        section, sections = scatter_receive, None
        if self._replica_group is not None:
            group = self._replica_group
            size = len(section) // dist.get_world_size(group)
            section = section.narrow(0, dist.get_rank(group) * size, size)
            sections = Sections(group, scatter_receive, section)
        # The last elements of a section may be unused.
        section = section[: sum(bucket.scatter.receives.values())]
        return _Bucket(
            list(self._tasks_of(bucket.stacks, stacks)),
            self._message(bucket.gather, gather_send, gather_receive),
            self._message(bucket.scatter, scatter_send, section),
            sections,
            {
                name: RowMoves(
                    bucket.moves[name],
                    sides[source],
                    sides[target],
                    self._tensors,
                    self._factors if target == "results" else None,
                )
                for name, (source, target) in TABLES.items()
            },
        )

    def _tasks_of(self, stacks: Sequence[Stack], memory: torch.Tensor) -> Iterator[StackTask]:
        """Yield the orthogonalizations of stacks, which are end to end in memory."""
        num_inputs = self.plan.dtypes.num_inputs
        first, inputs = 0, memory.view(num_inputs, len(memory) // num_inputs)
        owner = self._newton_schulz.owner
        for stack in stacks:
            part, act = stack[0], None
            shape = (len(stack), part.num_rows, part.num_cols)
            tensors = inputs[:, first : first + math.prod(shape)].unflatten(1, shape)
            first += stack_elements(stack)
            args = NewtonSchulzArgs(
                self._newton_schulz,
                self.plan.matrices[part.matrix].blocks[part.block],
                self.plan.dtypes.normalizes,
                self._parts_groups[part.owners] if len(part.owners) > 1 else None,
            )
            if owner is not None:
                act = owner.claim(list(map(self._named, stack)), *tensors)
            yield StackTask(tensors[0], BACKENDS[self.plan.cost.backend], args, act)

    def _named(self, part: Part) -> tuple[torch.Tensor, str]:
        """Return the parameter and the name of a matrix."""
        matrix, param = self.plan.matrices[part.matrix], self._params[part.matrix]
        assert param is not None, "ranks of a domain have its parameters"
        # Names do not depend on the owner: state is saved under them.
        return param, matrix.name + f" block {part.block}" * (len(matrix.blocks) > 1)

    def _message(
        self, message: Message | None, sends: torch.Tensor, receives: torch.Tensor
    ) -> AllToAll | None:
        if message is None or self._group is None:
            return None
        ranks = dist.get_process_group_ranks(self._group)
        assert ranks == sorted(ranks), "routes of a message are in the order of ranks"
        sizes = ([elements.get(rank, 0) for rank in ranks] for elements in message)
        return AllToAll(self._group, sends, receives, *sizes)

    @property
    def workspace_bytes(self) -> int:
        """Memory that Newton-Schulz and methods need for one stack, at most."""
        tasks = (task for bucket in self.buckets for task in bucket.tasks)
        return max((task.workspace_bytes for task in tasks), default=0)

    def connect(self) -> None:
        """Connect the ranks that will exchange; called on all ranks together.

        NCCL connects two ranks when they first send to each other, and needs memory for it. In the
        first step this would be slow, and might fail after hours of loading.

        Communication: one element to every rank that this one will send to, and one from every
            replica to the others.
        """
        buckets = self.buckets[: len(self.plan.buckets)]
        messages = (message for b in buckets for message in (b.gather, b.scatter))
        connect([message for message in messages if message is not None])
        if buckets and buckets[0].sections is not None:
            buckets[0].sections.connect()

    def wait_for_leftovers(self) -> None:
        """Wait for collectives of a step that ended with an exception: they may use the memory."""
        for work in self.in_flight.values():
            wait(work)
        self.in_flight.clear()

    def writes(self, kind: str, number: int) -> list[RowMoves]:
        """Return the moves of results to shards in an action; at most one."""
        tables = {"local_matrices": "stay", "start_scatter": "stay", "finish_scatter": "arrive"}
        return [self.buckets[number].moves[tables[kind]]] if kind in tables else []

    def start_gather(self, number: int) -> None:
        """Pack and send rows."""
        bucket = self.buckets[number]
        self._read(bucket.moves["pack"])
        self.in_flight["gather", number] = bucket.gather and bucket.gather.start()

    def wait_for_gather(self, number: int) -> None:
        """Wait for rows; their messages may be written again."""
        wait(self.in_flight.pop(("gather", number)))

    def orthogonalize(self, number: int) -> None:
        """Replace this rank's stacks of a bucket, whose rows have arrived, by their results."""
        bucket = self.buckets[number]
        # Not before the gather has ended: the stacks may share memory with its messages.
        bucket.moves["unpack"].run()
        self._read(bucket.moves["keep"])
        for task in bucket.tasks:
            task.run()

    def start_scatter(self, number: int) -> list[Handle]:
        """Pack and send results; write this rank's own ones while others are in flight."""
        bucket = self.buckets[number]
        bucket.moves["return"].run()
        # Before this rank's own results are written: the collective runs meanwhile.
        work = bucket.scatter and bucket.scatter.start()
        if bucket.sections is not None:
            # Replicas pass on sections that the scatter must have filled; the host does not wait.
            work = self._chain.after(work, bucket.sections.start)
        self.in_flight["scatter", number] = work
        return self._write(bucket.moves["stay"])

    def finish_scatter(self, number: int) -> list[Handle]:
        """Wait for results, and write them."""
        wait(self.in_flight.pop(("scatter", number)))
        return self._write(self.buckets[number].moves["arrive"])

    def local_matrices(self, number: int) -> list[Handle]:
        """Orthogonalize a stack of local matrices, and write the results."""
        self.orthogonalize(number)
        return self._write(self.buckets[number].moves["stay"])

    def _read(self, moves: RowMoves) -> None:
        """Move rows, divided by the norms of their blocks unless they are sent in fp32."""
        moves.run(divisors=self.norms.values if self.plan.dtypes.normalizes else None)

    def _write(self, moves: RowMoves) -> list[Handle]:
        """Move results to shards, scaled in fp32."""
        moves.run()
        return moves.completed
