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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings, coefficients_of
from megatron_muon.plan.rank_plan import LocalStack, RankSchedule
from megatron_muon.plan.schedule import Action
from megatron_muon.runtime.arena import NOTHING, Arena, OtherBytes, allocating
from megatron_muon.runtime.exchange import Chain
from megatron_muon.runtime.local_rows import Handle, Rows, StackTask
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.plan_runner import BoundPlan, PlanRunner, profiler_range
from megatron_muon.runtime.row_moves import Addresses


class Engine:
    """Orthogonalize the matrices of all plans of a rank once, on their owners.

    All ranks of a plan's group make the same collective calls of the plan in the same order.

    Args:
        plans: Plans of this rank, in the same order on all ranks.
        schedule: This rank's step over all of them.
        newton_schulz: Steps, coefficients, precision and scale.
        device: Where messages and stacks are.
        rows_device: Where local rows are, if they are in CPU memory; None for ``device``.

    Communication: a step is, per plan, one all-reduce of 8 bytes a block (if rows are sent in bf16;
        16 if a method needs norms) and, per bucket, one ``all_to_all_single`` to the owners and one
        back, of the plan's routes without padding. With replicas there may be several back, to one
        replica at a time, followed by an ``all_gather_into_tensor`` between replicas if they
        received anything. Owners of a split matrix also exchange n x n matrices in Newton-Schulz, n
        the shorter side, as often as their backend says, and all-reduce its norm if rows are sent
        in fp32. It ends with ``Moments.share()`` of each plan.
    Memory: ``staging_bytes`` while a step runs, laid out by ``StagingLayout``; beside it the
        workspace of Newton-Schulz for one stack. Between steps the tables of ``RowMoves``.

    Attributes:
        plans: Plans of this rank.
        handles: Handles of all plans.
        runners: Runners by plan.
        staging_bytes: Memory of messages and stacks while a step runs, bytes.
    """

    def __init__(
        self,
        plans: Sequence[BoundPlan],
        schedule: RankSchedule,
        newton_schulz: NewtonSchulzSettings,
        *,
        device: torch.device,
        rows_device: torch.device | None = None,
    ) -> None:
        # Raises now rather than in a step.
        coefficients_of(newton_schulz.steps, newton_schulz.coefficient_type)
        self.plans = [bound.plan for bound in plans]
        self.handles: list[Any] = [handle for bound in plans for handle in bound.handles.values()]
        self.staging_bytes = schedule.staging.num_bytes
        self._schedule = schedule
        self._device = device
        self._arena = Arena(self.staging_bytes, device, "messages and stacks")
        memory = self._arena.view(0, self.staging_bytes, torch.uint8)
        # The kernel that moves rows is compiled and compared now rather than in a step.
        self._addresses = Addresses([memory], device)
        local_offset: dict[LocalStack, int] = {
            stack: offset
            for stacks, offset in zip(schedule.local, schedule.staging.local, strict=True)
            for stack in stacks
        }
        chain = Chain(device)
        self.runners = [
            PlanRunner(
                bound,
                rank_plan,
                schedule.staging.plans[number],
                [local_offset[LocalStack(number, i)] for i, _ in enumerate(rank_plan.local)],
                newton_schulz,
                self._arena,
                chain,
                self._addresses,
                rows_device=rows_device or device,
            )
            for number, (bound, rank_plan) in enumerate(
                zip(plans, schedule.rank_plans, strict=True)
            )
        ]
        self._workspace_bytes = max((each.workspace_bytes for each in self.runners), default=0)
        self.reserve()
        self.release()
        # They are kept after a step: their views serve the next one if it has the same rows.
        self._updates: Rows | None = None
        self._results: Rows | None = None

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

    def connect(self) -> None:
        """Connect the ranks that will exchange; called on all ranks together.

        NCCL connects two ranks when they first send to each other, and needs memory for it. In the
        first step this would be slow, and might fail after hours of loading.

        Communication: per plan one element to every rank that this one will send to, in two
            collectives, and one from every replica to the others.
        """
        for runner in self.runners:
            runner.connect()

    def check_kernels(self) -> None:
        """Compare custom kernels of backends with their reference in torch.

        It runs once for each shape of this rank's stacks, without other ranks, and compiles the
        kernels: otherwise the first step would wait for it.

        Raises:
            Exception: First error of a kernel: wrong results for a shape, or its own error.

        Memory: one stack, and what Newton-Schulz needs for it twice, until it returns.
        """
        for runner in self.runners:
            runner.check_kernels()

    @torch.no_grad()
    def orthogonalize(
        self, updates: Rows, results: Rows, overlap_fn: Callable[[], None] | None = None
    ) -> Iterator[list[Handle]]:
        """Orthogonalize all matrices, and yield handles as their results arrive.

        The caller must exhaust the iterator: every rank joins the collectives of all buckets.
        Nothing is sent before the first item is asked for.

        Args:
            updates: By handle, this rank's rows of the matrices, ``(local_rows, cols)`` float32.
                They must stay as they are until the handle is yielded. Views of both are created
                again only where one is another dictionary than in the step before: call
                ``forget()`` to drop them.
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
        if updates is not self._updates or results is not self._results:
            self.forget()
            for runner in self.runners:
                runner.rows.view(updates, results)
            self._updates, self._results = updates, results
        self._addresses.update()
        for runner in self.runners:
            with profiler_range("norms"):
                runner.rows.begin()
        for action in self._schedule.actions:
            if overlap_fn is not None and action.kind != "start_gather":
                overlap_fn()
                overlap_fn = None
            yield from self._run(action)
        if overlap_fn is not None:
            overlap_fn()
        # Not after an exception: a collective that was not waited for may still use the memory.
        self._arena.free()
        for moments in self.moments:
            moments.share()

    def _run(self, action: Action) -> Iterator[list[Handle]]:
        """Run one action of ``megatron_muon.plan.schedule``, and yield complete handles."""
        kind, plan, number = action
        complete: list[Handle] | None = None
        if kind == "local":
            # One after the other: they share memory, and a result is written back before the next
            # stack is read.
            for stack in self._schedule.local[number]:
                with profiler_range("local_matrices"):
                    complete = self.runners[stack.plan].local(stack.number)
                yield complete
            return
        runner = self.runners[plan]
        with profiler_range(kind):
            match kind:
                case "start_gather":
                    runner.start_gather(number)
                case "wait_for_gather":
                    runner.wait_for_gather(number)
                case "orthogonalize":
                    runner.orthogonalize(number)
                case "start_scatter":
                    complete = runner.start_scatter(number)
                case "finish_scatter":
                    complete = runner.finish_scatter(number)
        if complete is not None:
            yield complete

    @property
    def moments(self) -> list[Moments]:
        """State of the method by plan; none without a method."""
        return [runner.moments for runner in self.runners if runner.moments is not None]

    def see_gradients(self, gradients: Rows) -> None:
        """Sum the squares of gradients, whose norms a method needs; called before a step."""
        for runner in self.runners:
            runner.rows.norms.see_gradients(runner.rows.by_matrix(gradients))

    def watch(self, function: Callable[[StackTask], None] | None) -> None:
        """Call a function with every stack of this rank's results; None for no call."""
        for runner in self.runners:
            runner.watch = function

    def forget(self) -> None:
        """Drop the rows of the last step, which are memory of the caller's."""
        self._updates = self._results = None
        # All but the arena.
        del self._addresses.tensors[1:]
        for runner in self.runners:
            runner.rows.forget()
