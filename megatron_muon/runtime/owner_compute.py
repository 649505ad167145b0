# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans and engine for the matrices of one Muon optimizer."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.domain_plan import (
    group_of,
    groups_problem,
    most_instances,
    of_group,
    plan_domain,
)
from megatron_muon.plan.exchange_plan import ExchangePlan, staging_problem
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.report import log_lines
from megatron_muon.plan.settings import ExchangeSettings
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
    """Matrices of one domain that are replicated alike: they share a plan.

    Args:
        domain: The ranks that exchange them.
        matrices: All of them, in the same order on all ranks of the domain.
        handles: By index among the matrices, what stands for those of which this rank holds rows:
            :meth:`OwnerCompute.orthogonalize` takes and yields them.
        replicas: All ranks of the domain, by the rows that they hold; each set ascending, and as
            long as the others.
        replica_group: Those with this rank's rows; None where nobody else has them.
        instance_group: One rank of each of these sets, this one among them, where the model has
            such a group; None where it has none.
    """

    domain: Domain
    matrices: Sequence[MatrixLayout]
    handles: Mapping[int, Any]
    replicas: Sequence[tuple[int, ...]]
    replica_group: dist.ProcessGroup | None
    instance_group: dist.ProcessGroup | None = None


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
        initial_load_s: Newton-Schulz seconds of this rank in other optimizers.

    Raises:
        ValueError: bf16 on the wire with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when instances cannot form the groups that settings name, when
            no plan fits into the staging memory, when ranks came to different plans, or when one of
            them lacks memory for the engine or a kernel for Newton-Schulz.

    Communication: at construction three flags over the job; for each kind an all-gather of 8 bytes
        a rank and a hash; three lists of ranks as objects, and a new process group for each set of
        ranks that splits a matrix, in which one element is all-reduced. There are new groups too
        for instances that work apart from others, and on CPU ranks for replicas. For each kind two
        collectives send one element from each rank to those that it will send to, and one gathers
        one from each replica. A choice of Newton-Schulz takes one flag more, and lists of names;
        measured times take one flag and broadcasts. A limit of staging memory takes two flags more,
        a number of groups of instances one, and an all-reduce of 8 bytes.
        :meth:`orthogonalize`: see :class:`~megatron_muon.runtime.engine.Engine`.
    """

    plans: list[ExchangePlan]  # of each kind
    # Newton-Schulz seconds of this rank, the initial load included. If instances work in groups, of
    # the ranks in one place of all groups the busiest counts for each.
    load_s: float

    def __init__(
        self,
        kinds: Sequence[Kind],
        newton_schulz: NewtonSchulzSettings,
        settings: ExchangeSettings,
        *,
        device: torch.device,
        num_kinds: int | None = None,
        initial_load_s: float = 0.0,
    ) -> None:
        rank = own_rank()
        self.plans = []
        self.load_s = initial_load_s
        if settings.instance_groups is not None:
            domains = [kind.replicas for kind in kinds]
            # A rank without replicas may be one of a job that has some.
            most = _most_of_all_ranks(most_instances(domains), device)
            _raise_where_any_rank_says(groups_problem(domains, settings, most=most), device)
        costs = machine_costs(
            [(kind.domain, kind.matrices) for kind in kinds], newton_schulz, settings, device
        )
        differences = []
        for kind, cost in zip(kinds, costs, strict=True):
            plan = plan_domain(
                kind.matrices,
                kind.replicas,
                cost,
                settings.wire_for(newton_schulz.is_bf16),
                settings,
                load_s=self._loads(kind.domain, device),
                num_kinds=num_kinds or len(kinds),
            )
            # Before groups of instances take other ranks for it: all must have the same.
            differences += _differences(plan, newton_schulz, settings, kind.domain, device)
            plan = of_group(plan, kind.replicas, group_of(plan, kind.replicas, rank))
            self.plans.append(plan)
            self.load_s = plan.assignment.load_s[rank]
        # Here, and not where they are found: ranks of other domains may be fine, and all of them
        # stop together.
        raise_where_any_rank_fails(
            differences,
            None,
            device,
            "Build the same model with the same arguments on every rank. No optimizer was built.",
        )
        if settings.staging_bytes is not None:
            _raise_where_any_rank_says(staging_problem(self.plans, settings.staging_bytes), device)
        parts_groups = _parts_groups(self.plans, rank, device)
        of_rank = [
            PlanOfRank(
                plan, kind.handles, groups.plan, kind.domain.group, groups.replicas, parts_groups
            )
            for plan, kind, groups in zip(
                self.plans, kinds, _groups(kinds, self.plans, rank, device), strict=True
            )
        ]
        self._engine = _together(
            lambda: Engine(of_rank, newton_schulz, rank=rank, device=device), settings, device
        )
        if settings.staging_bytes is not None:
            _raise_where_any_rank_says(_excess(self._engine, settings.staging_bytes), device)
        # Apart: owners of a split matrix may wait for each other here, so all must have an engine.
        _together(self._engine.check_kernels, settings, device)
        self._engine.connect()
        # Other ranks have no handler; further domains of the same kind look alike.
        for plan in self.plans if settings.log_plan else ():
            if rank == plan.plan_seconds.ranks[0]:
                for line in log_lines(plan):
                    logger.info("%s", line)

    def _loads(self, domain: Domain, device: torch.device) -> dict[int, float]:
        """Gather the seconds that each rank of a domain spends on matrices planned before."""
        if domain.group is None:
            return {domain.ranks[0]: self.load_s}
        # Nanoseconds are finer than any estimate, and all backends gather integers.
        mine = torch.tensor([round(self.load_s * 1e9)], dtype=torch.int64, device=device)
        table = mine.new_empty(len(domain.ranks))
        dist.all_gather_into_tensor(table, mine, group=domain.group)
        return {
            rank: load_ns * 1e-9 for rank, load_ns in zip(domain.ranks, table.tolist(), strict=True)
        }

    @property
    def staging_bytes(self) -> int:
        """Memory of messages and stacks while a step runs, bytes."""
        return self._engine.staging_bytes

    def orthogonalize(self, momentum: Rows, results: Rows) -> Iterator[list[Any]]:
        """Orthogonalize all matrices; see :meth:`Engine.orthogonalize`."""
        return self._engine.orthogonalize(momentum, results)


def _most_of_all_ranks(number: int, device: torch.device) -> int:
    most = torch.tensor([number], dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


def _raise_where_any_rank_says(problem: str | None, device: torch.device) -> None:
    problems = [problem] if problem is not None else []
    raise_where_any_rank_fails(problems, None, device, "No optimizer was built.")


def _excess(engine: Engine, staging_bytes: int) -> str | None:
    """Describe by how much an engine exceeds a limit of memory, or return None.

    Plans keep it but for rounding to rows, which they do not see.
    """
    if engine.staging_bytes <= staging_bytes:
        return None
    return (
        f"staging memory: expected at most {staging_bytes:,} bytes, got {engine.staging_bytes:,}. "
        f"Set exchange.staging_bytes to {math.ceil(1.1 * engine.staging_bytes)} or more"
    )


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
        f"{settings} {newton_schulz.steps} steps {plan.wire} "
        # Decides which replica is near, and so who gets how much of a result.
        f"{plan.cost.ranks_per_node} ranks a node",
        *plan.entries(),
    ]
    difference = difference_between_ranks(entries, domain.group, device, "Muon exchange plan")
    return [] if difference is None else [difference]


class _Groups(NamedTuple):
    """Groups of one plan; None where this rank is alone.

    Args:
        plan: Ranks of the plan.
        replicas: Those of them that hold the same rows.
    """

    plan: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


def _groups(
    kinds: Sequence[Kind], plans: Sequence[ExchangePlan], rank: int, device: torch.device
) -> list[_Groups]:
    """Return the groups in which plans are run: those of the model, or new ones."""
    ranks_of_plans = [tuple(plan.plan_seconds.ranks) for plan in plans]
    of_plans = _find(
        [
            _Wanted(ranks, (kind.domain.group, kind.instance_group))
            for kind, ranks in zip(kinds, ranks_of_plans, strict=True)
        ]
    )
    of_replicas = []
    for kind, ranks, group in zip(kinds, ranks_of_plans, of_plans, strict=True):
        (same_rows,) = (each for each in kind.replicas if rank in each)
        # On a CPU a thread passes results on, beside what others do in the groups of the model: it
        # has a new one.
        known = (kind.replica_group, group) if device.type != "cpu" else ()
        of_replicas.append(_Wanted(tuple(each for each in same_rows if each in ranks), known))
    return [_Groups(*groups) for groups in zip(of_plans, _find(of_replicas), strict=True)]


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
