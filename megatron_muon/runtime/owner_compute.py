# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans and engine for the parameters of one Muon optimizer."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.assignment import assign
from megatron_muon.plan.exchange_plan import ExchangePlan, staging_problem
from megatron_muon.plan.layout import MatrixLayout, block_rows, whole_matrix
from megatron_muon.plan.report import log_lines
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import (
    first_line,
    raise_where_any_rank_fails,
    raise_where_ranks_differ,
)
from megatron_muon.runtime.domain import Domain, find_domain, new_groups
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.local_rows import Rows
from megatron_muon.runtime.machine_cost import machine_cost
from megatron_muon.runtime.plan_buckets import PlanOfRank
from megatron_muon.runtime.sharded_matrix import ShardedMatrix

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnedParameter:
    """One parameter, and which matrices Newton-Schulz sees of it.

    Args:
        param: The parameter.
        matrix: Its row shards.
        tensor_group: Tensor-parallel ranks whose parameters are one joined matrix; None where each
            orthogonalizes its own.
        partition_dim: Dimension that the tensor group shards.
        split_shapes: Rows of a query group that go to query, key and value; None for one block.
        has_copies: Whether other tensor-parallel ranks have a parameter of the same values.
    """

    param: torch.Tensor
    matrix: ShardedMatrix
    tensor_group: dist.ProcessGroup | None
    partition_dim: int | None
    split_shapes: tuple[int, ...] | None
    has_copies: bool = False


class OwnerCompute:
    """Orthogonalize the parameters of an optimizer, each on one rank of its domain.

    A parameter that tensor-parallel ranks replicate, such as a router, is one matrix for each of
    them, as it is upstream. Equal gradients keep these copies equal: each is orthogonalized whole
    and alone, by the same operations, whatever the plans of these ranks are. Only norms on the bf16
    wire may differ, as rarely as docs/numerics.md says.

    Args:
        kinds: Parameters of each kind, experts or dense matrices, in the same order on all ranks.
            Those of one kind are sharded over the same groups.
        newton_schulz: Steps, coefficients, precision and scale.
        settings: Wire, sizes and cost model.
        device: Where shards live.
        initial_load_s: Newton-Schulz seconds of this rank in other optimizers.

    Raises:
        ValueError: bf16 on the wire with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when parameters are sharded over different groups, have rows
            that are no whole number of query groups, when no plan fits into the staging memory,
            when ranks came to different plans, or when one of them lacks memory for the engine or a
            kernel for Newton-Schulz.

    Communication: at construction a flag, and for each kind an all-gather of 72 bytes a rank, two
        flags and a hash, lists of ranks and of differences as objects, and new process groups where
        a domain or a split matrix needs one. One element is all-reduced in each group of a split
        matrix. Two collectives send one from each rank to those that it will send to, and one
        gathers one from each replica. A choice of
        Newton-Schulz takes one flag and lists of names more, measured times one flag and one
        broadcast. A limit of staging memory takes two flags more.
        :meth:`orthogonalize`: see :class:`~megatron_muon.runtime.engine.Engine`.
    """

    plans: list[ExchangePlan]  # of each kind
    load_s: float  # Newton-Schulz seconds of this rank, the initial load included

    def __init__(
        self,
        kinds: Sequence[Sequence[OwnedParameter]],
        newton_schulz: NewtonSchulzSettings,
        settings: ExchangeSettings,
        *,
        device: torch.device,
        initial_load_s: float = 0.0,
    ) -> None:
        self.load_s = initial_load_s
        rank = dist.get_rank()
        of_rank = [self._plan(kind, newton_schulz, settings, len(kinds), device) for kind in kinds]
        self.plans = [each.plan for each in of_rank]
        if settings.staging_bytes is not None:
            # Ranks of other domains may have smaller matrices: all of them stop together.
            _raise_where_any_rank_says(staging_problem(self.plans, settings.staging_bytes), device)
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

    def _plan(
        self,
        parameters: Sequence[OwnedParameter],
        newton_schulz: NewtonSchulzSettings,
        settings: ExchangeSettings,
        num_kinds: int,
        device: torch.device,
    ) -> PlanOfRank:
        """Plan the exchange of one kind of parameters, and add its load to this rank's."""
        raise_where_any_rank_fails(_problems(parameters), None, device, "No optimizer was built.")
        # All parameters share these groups, which was just checked. A tensor group is found on
        # those that are joined.
        first = parameters[0].matrix
        tensor_groups = [p.tensor_group for p in parameters if p.tensor_group is not None]
        domain = find_domain(
            first.shard_group,
            tensor_groups[0] if tensor_groups else None,
            first.replica_group,
            first.holder_group,
            initial_load_s=self.load_s,
            device=device,
        )
        rank = dist.get_rank()
        matrices, own_parameters = _lay_out(parameters, domain)
        plan = _build_plan(matrices, newton_schulz, settings, num_kinds, domain, device)
        self.load_s = plan.assignment.load_s[rank]
        if domain.group is not None:
            # Every rank has built the plan by itself. Comparing hashes here turns what would be a
            # hang in the first step into an error that names the first difference.
            entries = [
                f"{settings} {newton_schulz.steps} steps {plan.wire} {plan.order} "
                # Decides which replica is near, and so who gets how much of a result.
                f"{plan.cost.ranks_per_node} ranks a node"
            ]
            entries += plan.entries()
            raise_where_ranks_differ(entries, domain.group, device, "Muon exchange plan")
        return PlanOfRank(
            plan,
            own_parameters,
            domain.group,
            first.replica_group,
            _parts_groups(plan, rank, device),
        )

    @property
    def staging_bytes(self) -> int:
        """Memory of messages and stacks while a step runs, bytes."""
        return self._engine.staging_bytes

    def orthogonalize(self, momentum: Rows, results: Rows) -> Iterator[list[torch.Tensor]]:
        """Orthogonalize all parameters; see :meth:`Engine.orthogonalize`."""
        return self._engine.orthogonalize(momentum, results)


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
        f"Set --muon-fsdp-staging-bytes to {math.ceil(1.1 * engine.staging_bytes)} or more"
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
        "If memory is short, lower --muon-fsdp-staging-bytes (now "
        f"{settings.wanted_staging_bytes:,}), shard over more ranks, or leave more memory free. No "
        "optimizer was built.",
    )
    return built


def _build_plan(
    matrices: Sequence[MatrixLayout],
    newton_schulz: NewtonSchulzSettings,
    settings: ExchangeSettings,
    num_kinds: int,
    domain: Domain,
    device: torch.device,
) -> ExchangePlan:
    """Plan the exchange of a domain; every rank comes to the same plan."""
    wire = settings.wire_for(newton_schulz.is_bf16)
    cost = machine_cost(matrices, newton_schulz, settings, domain, device)
    assignment = assign(
        matrices,
        cost,
        wire,
        max_parts=settings.max_parts,
        initial_load_s=domain.initial_load_s,
    )
    return ExchangePlan.build(
        matrices,
        assignment,
        cost,
        wire,
        staging_bytes=settings.wanted_staging_bytes // num_kinds,
        is_limit=settings.staging_bytes is not None,
    )


def _parts_groups(
    plan: ExchangePlan, rank: int, device: torch.device
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make the groups of ranks that split matrices, and use each once.

    A backend connects a group at its first collective, and what fails should fail here.
    """
    groups = new_groups(owners for owners in plan.sets_of_owners if rank in owners)
    for owners in sorted(groups):
        dist.all_reduce(torch.zeros(1, device=device), group=groups[owners])
    return groups


def _problems(parameters: Sequence[OwnedParameter]) -> list[str]:
    problems = []
    first = parameters[0].matrix
    # One domain has one grid of ranks: parameters of other groups need another OwnerCompute.
    for parameter in parameters:
        matrix = parameter.matrix
        if matrix.shard_group is not first.shard_group or (
            matrix.replica_group is not first.replica_group
        ):
            problems.append(
                f"{matrix.fqn}: expected the shard group of {first.fqn}, got another. Build one "
                "optimizer for dense parameters and one for experts"
            )
        try:
            block_rows(matrix.layout.num_rows, parameter.split_shapes)
        except ValueError as error:
            problems.append(f"{matrix.fqn}: {error}")
    return problems


def _lay_out(
    parameters: Sequence[OwnedParameter], domain: Domain
) -> tuple[list[MatrixLayout], dict[int, torch.Tensor]]:
    """Lay out the matrices of all parameters.

    Returns:
        All matrices of the domain, those of other tensor-parallel ranks included; and by its index
        among them, the parameter of this rank.
    """
    matrices: list[MatrixLayout] = []
    own_parameters: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        # Joined, all tensor ranks have the one matrix. Otherwise each has one, in their order.
        tensor_rank = domain.tensor_rank if parameter.tensor_group is None else 0
        own_parameters[len(matrices) + tensor_rank] = parameter.param
        matrices += _matrices_of(parameter, domain)
    return matrices, own_parameters


def _matrices_of(parameter: OwnedParameter, domain: Domain) -> list[MatrixLayout]:
    """Return the one matrix of a joined parameter, or that of each tensor-parallel rank."""
    matrix = parameter.matrix
    if parameter.tensor_group is not None:
        return [
            whole_matrix(
                matrix.fqn,
                matrix.layout,
                domain.holders,
                partition_dim=parameter.partition_dim,
                split_shapes=parameter.split_shapes,
                domain=domain.ranks,
            )
        ]
    return [
        whole_matrix(
            matrix.fqn if len(domain.holders) == 1 else f"{matrix.fqn} (tensor rank {index})",
            matrix.layout,
            [holders],
            split_shapes=parameter.split_shapes,
            has_copies=parameter.has_copies,
        )
        for index, holders in enumerate(domain.holders)
    ]
