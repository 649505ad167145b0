# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the plans of a rank: local rows in, orthogonalized local rows out.

``megatron_muon.plan.schedule`` defines the order of a step. For one plan with buckets 0, 1, 2, ...
and one bucket in flight beside the one in work::

    norms | gather 0 | local | gather 1 | orthogonalize 0 |           scatter 0
                     | local | gather 2 | orthogonalize 1 | yield 0 | scatter 1
                     | local | gather 3 | orthogonalize 2 | yield 1 | scatter 2 | ... | local

Gathers and scatters are launched asynchronously: they are in flight while other buckets are
orthogonalized. Local matrices, which need no exchange, are spread evenly over the rounds.

Over NCCL collectives run on the process group's own stream, and waiting for them is an event: the
host never waits. Over gloo they run on its threads.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings, coefficients_of
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import Ranks
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.runtime.arena import NOTHING, Arena, OtherBytes, allocating
from megatron_muon.runtime.exchange import Chain
from megatron_muon.runtime.plan_runner import PlanInput, PlanRunner, profiler_range
from megatron_muon.runtime.row_moves import Handle, Rows, Side, Tensors


class Engine:
    """Orthogonalize the matrices of all plans of a rank once, on their owners.

    All ranks of a plan's group make the same collective calls of the plan in the same order.

    Args:
        plans: Plans of this rank, in the same order on all ranks.
        inputs: By plan, its process groups, and handles of this rank's rows.
        schedule: This rank's step over all of them.
        parts_groups: The process groups of the sets of owners that this rank belongs to.
        newton_schulz: Steps, coefficients, precision and scale.
        device: Where messages and stacks are.
        rows_device: Where local rows are, if they are in CPU memory; None for ``device``.

    Communication: a step is, per plan with buckets, one all-reduce of 8 bytes a block (if rows are
        sent in bf16) and, per bucket, one ``all_to_all_single`` to the owners and one back, of the
        plan's routes without padding. With replicas there may be several back, to one replica at a
        time, followed by an ``all_gather_into_tensor`` between replicas if they received anything.
        Owners of a split matrix also exchange n x n matrices in Newton-Schulz, n the shorter side,
        as often as their backend says, and all-reduce its norm if rows are sent in fp32.
    Memory: ``staging_bytes`` while a step runs, laid out by ``StagingLayout``; beside it the
        workspace of Newton-Schulz for one stack. Between steps the tables of ``RowMoves``.

    Attributes:
        plans: Plans of this rank.
        handles: Handles of all plans, in the order of matrices.
        runners: Runners by plan.
        staging_bytes: Memory of messages and stacks while a step runs, bytes.
    """

    def __init__(
        self,
        plans: Sequence[ExchangePlan],
        inputs: Sequence[PlanInput],
        schedule: RankSchedule,
        parts_groups: Mapping[Ranks, dist.ProcessGroup],
        newton_schulz: NewtonSchulzSettings,
        *,
        device: torch.device,
        rows_device: torch.device | None = None,
    ) -> None:
        # Raises now rather than in a step.
        coefficients_of(newton_schulz.steps, newton_schulz.coefficient_type)
        self.plans = list(plans)
        self.handles: list[Any] = [
            handle for plan_input in inputs for handle in plan_input.handles.values()
        ]
        self.staging_bytes = schedule.staging_bytes
        self._actions = schedule.actions
        self._device = device
        self._arena = Arena(self.staging_bytes, device, "messages and stacks")
        memory = self._arena.view(0, self.staging_bytes, torch.uint8)
        # The kernel that moves rows is compiled and compared now rather than in a step.
        self._tensors = Tensors(memory, rows_device or device)
        chain, num_handles = Chain(device), len(self.handles)
        num_inputs = plans[0].dtypes.num_inputs if plans else 1
        ends = itertools.accumulate((len(plan_input.handles) for plan_input in inputs), initial=0)
        # Handles by plan. Shards of inputs of all plans come first, then shards of results.
        self._by_plan = list(itertools.starmap(slice, itertools.pairwise(ends)))
        self.runners = [
            PlanRunner(
                plan,
                inputs[number],
                schedule.rank_plans[number],
                schedule.offsets[number],
                (
                    Side(torch.float32, num_inputs * own.start),
                    Side(torch.float32, num_inputs * num_handles + own.start),
                ),
                newton_schulz,
                parts_groups,
                self._arena,
                chain,
                self._tensors,
            )
            for number, (plan, own) in enumerate(zip(plans, self._by_plan, strict=True))
        ]
        self._find_completed(num_inputs)
        self._workspace_bytes = max((runner.workspace_bytes for runner in self.runners), default=0)
        self.reserve()
        self.release()
        # They are kept after a step: their views serve the next one if it has the same rows.
        self._inputs: tuple[Rows, ...] = ()
        self._results: Rows | None = None

    def _find_completed(self, num_inputs: int) -> None:
        """Find the last moves of results to every shard: the order of a step never changes."""
        completed: set[int] = set()
        for kind, plan, number in reversed(self._actions):
            for moves in self.runners[plan].writes(kind, number):
                targets = dict.fromkeys(move[4] for move in moves.moves)
                # Shards of results come after all shards of inputs, which count from 1.
                moves.completed = [
                    self.handles[target - 1 - num_inputs * len(self.handles)]
                    for target in targets
                    if target not in completed
                ]
                completed.update(targets)

    def reserve(self, others: OtherBytes = NOTHING) -> None:
        """Reserve the memory of a step: arena and workspace. The arena stays until the step ends.

        A rank that runs out of memory inside of a step leaves the others in a collective.
        Therefore ranks reserve it before, and agree.

        Args:
            others: Allocations of others; their temporaries while no matrix is orthogonalized.

        Raises:
            MemoryError: The device has too little memory, with sizes.
        """
        self._wait_for_leftovers()
        self._arena.allocate()
        other_bytes = others.state + max(others.temporaries, self._workspace_bytes)
        with allocating(other_bytes, self._device, "Newton-Schulz and other optimizers"):
            # Freed at once: the allocator keeps the block for Newton-Schulz and other optimizers.
            torch.empty(other_bytes, dtype=torch.uint8, device=self._device)

    def release(self) -> None:
        """Return the memory of ``reserve()``, if ranks do not step."""
        self._wait_for_leftovers()
        self._arena.free()

    def _wait_for_leftovers(self) -> None:
        for runner in self.runners:
            runner.wait_for_leftovers()

    @torch.no_grad()
    def orthogonalize(
        self,
        updates: Rows | tuple[Rows, ...],
        results: Rows,
        overlap_fn: Callable[[], None] | None = None,
    ) -> Iterator[list[Handle]]:
        """Orthogonalize all matrices, and yield handles as their results arrive.

        The caller must exhaust the iterator: every rank joins the collectives of all buckets.
        Nothing is sent before the first item is asked for.

        Args:
            updates: By handle, this rank's rows of the matrices, ``(local_rows, cols)`` float32.
                They must stay as they are until the handle is yielded. Views of both are created
                again only where one is another dictionary than in the step before: call
                ``forget()`` to drop them. With an owner, weights and gradients.
            results: By handle, the rows that receive the scaled result, of the same shape and
                dtype. They may be the memory of the updates: all rows of a handle have been read
                when its first result comes.
            overlap_fn: Called once, when the first rows are in transit.

        Yields:
            Lists of handles whose results are complete. Every handle of this rank is yielded once.
        """
        self._wait_for_leftovers()
        # Before anything is sent: a rank without memory ends before it has joined a collective.
        self._arena.allocate()
        inputs = updates if isinstance(updates, tuple) else (updates,)
        if results is not self._results or not all(map(operator.is_, inputs, self._inputs)):
            shards: list[torch.Tensor] = []
            for runner, own in zip(self.runners, self._by_plan, strict=True):
                of_plan = [[rows[handle] for handle in self.handles[own]] for rows in inputs]
                runner.norms.bind(of_plan[0])
                shards += itertools.chain(*of_plan)
            self._tensors.bind([*shards, *(results[handle] for handle in self.handles)])
            self._inputs, self._results = inputs, results
        self._tensors.update()
        for runner in self.runners:
            # fp32 rows are not normalized before they are sent.
            if runner.plan.dtypes.normalizes:
                with profiler_range("norms"):
                    runner.norms.reduce()
        for kind, plan, number in self._actions:
            if overlap_fn is not None and kind != "start_gather":
                overlap_fn()
                overlap_fn = None
            with profiler_range(kind):
                complete = getattr(self.runners[plan], kind)(number)
            if complete is not None:
                yield complete
        if overlap_fn is not None:
            overlap_fn()
        # Not after an exception: a collective that was not waited for may still use the memory.
        self._arena.free()

    def forget(self) -> None:
        """Drop the rows of the last step, whose memory is the caller's."""
        self._inputs, self._results = (), None
        self._tensors.bind(())
        for runner in self.runners:
            runner.norms.bind(())
