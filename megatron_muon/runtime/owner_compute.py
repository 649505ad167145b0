# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans and engine for the matrices of one Muon optimizer."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import ExchangePlan, plan_matrices, staging_problem
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
from megatron_muon.runtime.domain import Domain, new_groups
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.local_rows import Rows
from megatron_muon.runtime.machine_cost import machine_costs
from megatron_muon.runtime.plan_buckets import PlanOfRank

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """Matrices of one domain with the same replicas: they share a plan.

    Args:
        domain: The ranks that exchange them.
        matrices: All of them, in the same order on all ranks of the domain.
        handles: By index among the matrices, what stands for those of which this rank holds rows:
            :meth:`OwnerCompute.orthogonalize` takes and yields them.
        replica_group: Ranks with this rank's rows; None where nobody else has them.
    """

    domain: Domain
    matrices: Sequence[MatrixLayout]
    handles: Mapping[int, Any]
    replica_group: dist.ProcessGroup | None


class OwnerCompute:
    """Orthogonalize the matrices of an optimizer, each on one rank of its domain.

    Args:
        kinds: Those that this rank has. Ranks may have different ones. Each rank has its own in an
            order that all ranks of the job share.
        newton_schulz: Steps, coefficients, precision and scale.
        settings: Wire, sizes and cost model.
        device: Where shards live.
        num_kinds: Most kinds that any rank has, which share the staging memory; None where all
            ranks have as many.

    Raises:
        ValueError: bf16 on the wire with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when no plan fits into the staging memory, when ranks came to
            different plans, or when one of them lacks memory for the engine or a kernel for
            Newton-Schulz.

    Communication: at construction three flags over the job; for each kind an all-gather of 24 bytes
        a rank and a hash; two lists of ranks as objects, and a new process group for each set of
        ranks that splits a matrix, in which one element is all-reduced. There are new groups too
        for replicas on CPU ranks. For each kind two collectives send one element from each rank to
        those that it will send to, and one gathers one from each replica. A choice of Newton-Schulz
        needs one flag more, and lists of names; a limit of staging memory one flag more.
        :meth:`orthogonalize`: see :class:`~megatron_muon.runtime.engine.Engine`.
    """

    plans: list[ExchangePlan]  # of each kind

    def __init__(
        self,
        kinds: Sequence[Kind],
        newton_schulz: NewtonSchulzSettings,
        settings: ExchangeSettings,
        *,
        device: torch.device,
        num_kinds: int | None = None,
    ) -> None:
        self._rank = own_rank()
        self._device = device
        self._settings = settings
        self.plans = self._plan(kinds, newton_schulz, num_kinds or len(kinds))
        schedule = self._schedule()
        of_rank = self._make_groups(kinds)
        self._engine = _together(
            lambda: Engine(of_rank, schedule, newton_schulz, rank=self._rank, device=device),
            settings,
            device,
        )
        # Separately: owners of a split matrix may wait for each other here, so all must have an
        # engine.
        _together(self._engine.check_kernels, settings, device)
        self._engine.connect()
        # Other ranks have no handler; further domains of the same kind look the same.
        for plan in self.plans if settings.log_plan else ():
            if self._rank == plan.ranks[0]:
                for line in log_lines(plan):
                    logger.info("%s", line)

    def _plan(
        self, kinds: Sequence[Kind], newton_schulz: NewtonSchulzSettings, num_kinds: int
    ) -> list[ExchangePlan]:
        """Plan each kind on top of those before it, and compare plans across ranks."""
        settings, device = self._settings, self._device
        wire = settings.wire_for(newton_schulz.is_bf16)
        costs = machine_costs([kind.domain for kind in kinds], newton_schulz, settings, device)
        plans: list[ExchangePlan] = []
        differences = []
        load_ns = staged_bytes = 0
        for number, (kind, cost) in enumerate(zip(kinds, costs, strict=True)):
            loads_ns, most_staged, position = _before(
                kind.domain, (load_ns, staged_bytes, number), device
            )
            plan = plan_matrices(
                kind.matrices,
                cost,
                settings,
                wire,
                load_ns=loads_ns,
                staging_bytes=settings.share_of_staging(most_staged, num_kinds - position),
            )
            differences += _differences(plan, newton_schulz, settings, kind.domain, device)
            plans.append(plan)
            load_ns = plan.assignment.load_ns[self._rank]
            staged_bytes += plan.staging_bytes
        # Here, and not where they are found: ranks of other domains may be fine, and all of them
        # stop together.
        raise_where_any_rank_fails(
            differences,
            None,
            device,
            "Build the same model with the same arguments on every rank. No optimizer was built.",
        )
        return plans

    def _schedule(self) -> RankSchedule:
        """Return what this rank does in a step, or raise on all ranks where memory is exceeded."""
        schedule = RankSchedule.build(self.plans, self._rank)
        limit = self._settings.staging_bytes
        if limit is not None:
            problem = staging_problem(self.plans, schedule.staging.num_bytes, limit)
            problems = [problem] if problem is not None else []
            raise_where_any_rank_fails(problems, None, self._device, "No optimizer was built.")
        return schedule

    def _make_groups(self, kinds: Sequence[Kind]) -> list[PlanOfRank]:
        """Return the plans with the process groups that they need, made where they are missing."""
        parts_groups = _parts_groups(self.plans, self._rank, self._device)
        of_plans = _find(
            [
                _Wanted(plan.ranks, (kind.domain.group,))
                for kind, plan in zip(kinds, self.plans, strict=True)
            ]
        )
        of_replicas = []
        for kind, group in zip(kinds, of_plans, strict=True):
            ranks: tuple[int, ...] = (self._rank,)
            if kind.replica_group is not None:
                ranks = tuple(sorted(dist.get_process_group_ranks(kind.replica_group)))
            # On a CPU a thread passes results on, beside what others do in the groups of the model:
            # it has a new one.
            known = (kind.replica_group, group) if self._device.type != "cpu" else ()
            of_replicas.append(_Wanted(ranks, known))
        groups = zip(kinds, self.plans, of_plans, _find(of_replicas), strict=True)
        return [
            PlanOfRank(plan, kind.handles, group, replicas, parts_groups)
            for kind, plan, group, replicas in groups
        ]

    @property
    def staging_bytes(self) -> int:
        """Memory of messages and stacks while a step runs, bytes."""
        return self._engine.staging_bytes

    def orthogonalize(self, momentum: Rows, results: Rows) -> Iterator[list[Any]]:
        """Orthogonalize all matrices; see :meth:`Engine.orthogonalize`."""
        return self._engine.orthogonalize(momentum, results)


def _before(
    domain: Domain, before: tuple[int, int, int], device: torch.device
) -> tuple[dict[int, int], int, int]:
    """Gather what the ranks of a domain have planned before.

    Args:
        domain: The domain.
        before: Of this rank, the load in nanoseconds, the bytes of staging memory, and the number
            of plans. Ranks may have other plans before this one.
        device: Of the collective.

    Returns:
        The load of every rank, and the most bytes and plans of any of them.
    """
    if domain.group is None:
        return {domain.ranks[0]: before[0]}, *before[1:]
    mine = torch.tensor(before, dtype=torch.int64, device=device)
    table = mine.new_empty(len(domain.ranks), len(before))
    dist.all_gather_into_tensor(table.view(-1), mine, group=domain.group)
    loads_ns, staged, positions = zip(*table.tolist(), strict=True)
    return dict(zip(domain.ranks, loads_ns, strict=True)), max(staged), max(positions)


def _together[T](build: Callable[[], T], settings: ExchangeSettings, device: torch.device) -> T:
    """Call a function on each rank, or raise on all ranks where one lacks memory or a kernel.

    Otherwise that rank would end alone, and the others wait for it until their collectives time
    out.
    """
    problems = []
    try:
        built = build()
    # The arena raises MemoryError, other allocations RuntimeError: their text is enough. Kernels of
    # others raise whatever their compilers do.
    except Exception as error:
        problems.append(first_line(error))
    raise_where_any_rank_fails(
        problems,
        None,
        device,
        "If memory is short, lower exchange.staging_bytes (now "
        f"{settings.wanted_staging_bytes:,}), shard over more ranks, or leave more memory free. No "
        "optimizer was built.",
    )
    return built


def _differences(
    plan: ExchangePlan,
    newton_schulz: NewtonSchulzSettings,
    settings: ExchangeSettings,
    domain: Domain,
    device: torch.device,
) -> list[str]:
    """Compare the plans of a domain's ranks, each of which has built it by itself.

    What differs would be a hang in the first step.
    """
    if domain.group is None:
        return []
    entries = [
        # Costs decide sizes of stacks and which replica is the nearest.
        f"{settings} {newton_schulz.steps} steps {plan.wire} {plan.cost}",
        *plan.entries(),
    ]
    difference = difference_between_ranks(entries, domain.group, device, "Muon exchange plan")
    return [] if difference is None else [difference]


class _Wanted(NamedTuple):
    """A group that is needed.

    Args:
        ranks: Its ranks, ascending.
        known: Groups that exist, of which the one with these ranks is taken.
    """

    ranks: tuple[int, ...]
    known: Sequence[dist.ProcessGroup | None]


def _find(wanted: Sequence[_Wanted]) -> list[dist.ProcessGroup | None]:
    """Return the group of each set of ranks, and make those that are missing."""
    found: list[dist.ProcessGroup | None] = [
        next(
            (
                group
                for group in known
                if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks
            ),
            None,
        )
        for ranks, known in wanted
    ]
    made = new_groups(
        {
            ranks
            for (ranks, _), group in zip(wanted, found, strict=True)
            if group is None and len(ranks) > 1
        }
    )
    return [
        made.get(ranks) if group is None else group
        for (ranks, _), group in zip(wanted, found, strict=True)
    ]


def _parts_groups(
    plans: Sequence[ExchangePlan], rank: int, device: torch.device
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make the groups of ranks that split matrices, and use each once.

    A backend connects a group at its first collective, and what fails should fail here.
    """
    groups = new_groups(
        {owners for plan in plans for owners in plan.sets_of_owners if rank in owners}
    )
    for owners in sorted(groups):
        dist.all_reduce(torch.zeros(1, device=device), group=groups[owners])
    return groups
