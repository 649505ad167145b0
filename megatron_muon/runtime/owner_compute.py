# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans and engine for the matrices of one Muon optimizer."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.methods import Namo, StackMethod
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import (
    ExchangePlan,
    plan_matrices,
    staging_problem,
    staging_share,
)
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.report.table import log_lines
from megatron_muon.runtime.agreement import (
    difference_between_ranks,
    first_line,
    own_rank,
    raise_where_any_rank_fails,
)
from megatron_muon.runtime.arena import NOTHING, OtherBytes
from megatron_muon.runtime.domain import Domain
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.groups import new_groups
from megatron_muon.runtime.local_rows import Rows
from megatron_muon.runtime.machine_cost import machine_costs
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.plan_runner import BoundPlan
from megatron_muon.runtime.stacks import StackCall

logger = logging.getLogger(__name__)


class PlanInput(NamedTuple):
    """Matrices of one domain with the same replicas, which share a plan.

    Args:
        domain: The ranks that exchange them.
        matrices: All of them, in the same order on all ranks of the domain.
        handles: By index among the matrices, handles of those with rows on this rank:
            :meth:`OwnerCompute.orthogonalize` is given rows by handle, and yields handles.
        replica_group: Ranks with this rank's rows; None if there are no others.
        params: By index among the matrices, the parameter of this rank that it belongs to, if it
            has one: its state may be that of a method.
    """

    domain: Domain
    matrices: Sequence[MatrixLayout]
    handles: Mapping[int, Any]
    replica_group: dist.ProcessGroup | None
    params: Sequence[torch.Tensor | None] = ()


class OwnerCompute:
    """Orthogonalize the matrices of an optimizer, each on one rank of its domain.

    It is built in four steps, by all ranks of the job together: plan, make the process groups that
    the plans need, build the engine, and connect ranks. Before ranks connect, all of them go on, or
    all of them raise. A rank that fails while it connects raises alone: the others are in the same
    collective, until the launcher ends them or it times out.

    Args:
        inputs: What this rank plans, in an order that all ranks share. Ranks may have different
            ones.
        newton_schulz: Steps, coefficients, precision and scale.
        settings: Wire, sizes and cost model.
        device: Where matrices are orthogonalized.
        rows_device: See :class:`~megatron_muon.runtime.engine.Engine`.
        max_num_plans: Maximum number of plans of any rank, which share the staging memory; None if
            all ranks have the same number.

    Raises:
        ValueError: bf16 on the wire with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when no plan fits into the staging memory, when ranks came to
            different plans, or when one of them lacks memory for the engine or a kernel for
            Newton-Schulz.

    Communication: at construction three flags over the job; per plan an all-gather of 24 bytes a
        rank and a hash; a list of ranks as objects, and a new process group for each set of ranks
        that splits a matrix, in which one element is all-reduced. Per plan two collectives send one
        element to each rank that it will send to, and one gathers one from each replica. Another
        backend of Newton-Schulz than ``standard`` needs one flag more, and lists of names; a limit
        of staging memory one flag more.
        :meth:`orthogonalize`: see :class:`~megatron_muon.runtime.engine.Engine`.
    """

    inputs: list[PlanInput]
    plans: list[ExchangePlan]  # one per input

    def __init__(
        self,
        inputs: Sequence[PlanInput],
        newton_schulz: NewtonSchulzSettings,
        settings: ExchangeSettings,
        *,
        device: torch.device,
        rows_device: torch.device | None = None,
        max_num_plans: int | None = None,
    ) -> None:
        if isinstance(newton_schulz.method, StackMethod) or newton_schulz.function is not None:
            # It is called with whole matrices.
            settings = replace(settings, max_parts=1)
        self.inputs = list(inputs)
        self._rank, self._device, self._settings = own_rank(), device, settings
        self._rows_device = rows_device
        self.handles = [handle for each in inputs for handle in each.handles.values()]
        self.plans = self._plan(inputs, newton_schulz, max_num_plans or len(inputs))
        schedule = self._schedule()
        plans = self._make_groups(inputs)
        self._engine = self._build_engine(plans, schedule, newton_schulz)
        self._connect()
        # Other ranks have no log handler; further domains with the same layouts look the same.
        for plan in self.plans if settings.log_plan else ():
            if self._rank == plan.ranks[0]:
                for line in log_lines(plan):
                    logger.info("%s", line)

    def _plan(
        self, inputs: Sequence[PlanInput], newton_schulz: NewtonSchulzSettings, max_num_plans: int
    ) -> list[ExchangePlan]:
        """Plan every input on top of those before it, and compare plans across ranks."""
        settings, device = self._settings, self._device
        wire = settings.wire_for(newton_schulz.is_bf16)
        if isinstance(newton_schulz.method, Namo):
            wire = replace(wire, num_norms=2)
        elif newton_schulz.method is not None:
            # What it returns is not bf16-valued.
            wire = replace(wire, scatter_dtype="float32")
        costs = machine_costs([each.domain for each in inputs], newton_schulz, settings, device)
        plans: list[ExchangePlan] = []
        differences = []
        load_ns = staged_bytes = 0
        for number, (given, cost) in enumerate(zip(inputs, costs, strict=True)):
            loads_ns, most_staged, position = _planned_before(
                given.domain, (load_ns, staged_bytes, number), device
            )
            # Costs decide the sizes of stacks and which replica is the nearest.
            entries = [f"{settings} {newton_schulz.steps} steps {wire} {cost}"]
            share = staging_share(settings, most_staged, max_num_plans - position)
            try:
                plan = plan_matrices(
                    given.matrices, cost, settings, wire, load_ns=loads_ns, staging_bytes=share
                )
            except ValueError as error:
                # Others wait for the entries of this rank, and stop with it.
                differences += [first_line(error), *_differences(entries, given.domain, device)]
                continue
            entries += plan.entries()
            differences += _differences(entries, given.domain, device)
            plans.append(plan)
            load_ns = plan.assignment.load_ns[self._rank]
            staged_bytes += plan.staging_bytes
        # Not where they are found: ranks of other domains may be fine, and all stop together.
        raise_where_any_rank_fails(
            differences,
            None,
            device,
            "Build the same model with the same arguments on every rank. No optimizer was built.",
        )
        return plans

    def _schedule(self) -> RankSchedule:
        """Return what this rank does in a step, or raise on all ranks if memory is exceeded."""
        schedule = RankSchedule.build(self.plans, self._rank)
        limit = self._settings.staging_bytes
        if limit is not None:
            problem = staging_problem(self.plans, schedule.staging.num_bytes, limit)
            problems = [problem] if problem is not None else []
            raise_where_any_rank_fails(problems, None, self._device, "No optimizer was built.")
        return schedule

    def _make_groups(self, inputs: Sequence[PlanInput]) -> list[BoundPlan]:
        """Make the process groups that the plans lack."""
        parts_groups = _parts_groups(self.plans, self._rank, self._device)
        return [
            BoundPlan(plan, each.handles, each.domain.group, each.replica_group, parts_groups)
            for each, plan in zip(inputs, self.plans, strict=True)
        ]

    def _build_engine(
        self,
        plans: Sequence[BoundPlan],
        schedule: RankSchedule,
        newton_schulz: NewtonSchulzSettings,
    ) -> Engine:
        return self.on_all_ranks(
            lambda: Engine(
                plans,
                schedule,
                newton_schulz,
                rank=self._rank,
                device=self._device,
                rows_device=self._rows_device,
            )
        )

    def _connect(self) -> None:
        """Check kernels, and let every rank send to those that it will send to."""
        # Owners of a split matrix may wait for each other here, so all must have an engine.
        self.on_all_ranks(self._engine.check_kernels)
        is_logged = self._device.type == "cuda" and self._rank == 0
        free_before = torch.cuda.mem_get_info(self._device)[0] if is_logged else 0
        # Not on all ranks: the others would be in a collective that this rank has left. Waiting for
        # them would only hide its error until a timeout.
        self._engine.connect()
        if is_logged:
            free = torch.cuda.mem_get_info(self._device)[0]
            logger.info(
                "connecting took %d MB, %d MB are free", (free_before - free) / 1e6, free / 1e6
            )

    def on_all_ranks[T](self, build: Callable[[], T]) -> T:
        """Call a function, or raise on all ranks if one of them lacks memory or a kernel.

        Otherwise that rank would end alone, and the others would wait for it until their
        collectives time out.
        """
        problems = []
        try:
            built = build()
        # The arena raises MemoryError, other allocations RuntimeError: their text is enough.
        # Kernels of others raise whatever their compilers do.
        except Exception as error:
            problems.append(first_line(error))
        raise_where_any_rank_fails(
            problems,
            None,
            self._device,
            "If memory is short, lower exchange.staging_bytes (now "
            f"{self._settings.wanted_staging_bytes:,}), shard over more ranks, or leave more "
            "memory free. No optimizer was built.",
        )
        return built

    @property
    def staging_bytes(self) -> int:
        """Memory of messages and stacks while a step runs, bytes."""
        return self._engine.staging_bytes

    def memory_problems(self, others: OtherBytes = NOTHING) -> list[str]:
        """Take the memory of a step, and list what lacks; see :meth:`Engine.memory_problem`."""
        problem = self._engine.memory_problem(others)
        return [] if problem is None else [problem]

    def free(self) -> None:
        """Return the memory of :meth:`memory_problems`, if ranks do not step."""
        self._engine.free()

    def orthogonalize(
        self, momentum: Rows, results: Rows, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[list[Any]]:
        """Orthogonalize all matrices; see :meth:`Engine.orthogonalize`."""
        return self._engine.orthogonalize(momentum, results, meanwhile)

    def watch(self, function: Callable[[StackCall], None] | None) -> None:
        """Let a function see results; see :meth:`Engine.watch`."""
        self._engine.watch(function)

    @property
    def moments(self) -> list[Moments]:
        """State of the method by plan; none without a method."""
        return [plan.moments for plan in self._engine.plans if plan.moments is not None]

    def see_gradients(self, gradients: Rows) -> None:
        """Sum the squares of gradients, whose norms a method needs; called before a step."""
        for given, plan in zip(self.inputs, self._engine.plans, strict=True):
            plan.norms.see_gradients({i: gradients[each] for i, each in given.handles.items()})

    def forget(self) -> None:
        """Drop the rows of the last step; see :meth:`Engine.forget`."""
        self._engine.forget()


def _planned_before(
    domain: Domain, mine: tuple[int, int, int], device: torch.device
) -> tuple[dict[int, int], int, int]:
    """Gather what the ranks of a domain have planned before.

    Args:
        domain: The domain.
        mine: Of this rank, the load in nanoseconds, the bytes of staging memory, and the number of
            plans. Ranks may have different plans before this one.
        device: Of the collective.

    Returns:
        The load of every rank, and the maximum of bytes and of plans.
    """
    if domain.group is None:
        return {domain.ranks[0]: mine[0]}, *mine[1:]
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    table = sent.new_empty(len(domain.ranks), len(mine))
    dist.all_gather_into_tensor(table.view(-1), sent, group=domain.group)
    loads_ns, staged, positions = zip(*table.tolist(), strict=True)
    return dict(zip(domain.ranks, loads_ns, strict=True)), max(staged), max(positions)


def _differences(entries: list[str], domain: Domain, device: torch.device) -> list[str]:
    """Compare the plans that the ranks of a domain have built.

    A difference would hang the first step.
    """
    if domain.group is None:
        return []
    difference = difference_between_ranks(entries, domain.group, device, "Muon exchange plan")
    return [] if difference is None else [difference]


def _parts_groups(
    plans: Sequence[ExchangePlan], rank: int, device: torch.device
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make the groups of ranks that split matrices, and use them once.

    A backend connects a group at its first collective, and failures should surface here.
    """
    groups = new_groups(
        {owners for plan in plans for owners in plan.sets_of_owners if rank in owners}
    )
    for owners in sorted(groups):
        dist.all_reduce(torch.zeros(1, device=device), group=groups[owners])
    return groups
