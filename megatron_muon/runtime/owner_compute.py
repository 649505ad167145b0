# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plan and engine for the parameters of one Muon optimizer."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.assignment import assign
from megatron_muon.plan.cost import CPU_RANKS, CostModel
from megatron_muon.plan.layout import MatrixLayout, RowLayout, qkv_blocks, whole_matrix
from megatron_muon.plan.report import log_lines
from megatron_muon.plan.settings import ExchangeSettings, wire_bytes
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.runtime.domain import Domain, find_domain, new_groups
from megatron_muon.runtime.engine import Engine, NewtonSchulzSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardedMatrix:
    """What the optimizer must know of one DTensor parameter.

    Args:
        fqn: Fully qualified name, for errors.
        layout: Row shards of the tensor-parallel-local matrix.
        group: Group the rows are cut over; None where every rank holds the whole matrix.
        replicas: Group of ranks that hold copies of this rank's shard; None where there are none.
    """

    fqn: str
    layout: RowLayout
    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None = None

    @property
    def local_range(self) -> tuple[int, int]:
        """Rows ``[start, stop)`` that this rank holds."""
        return self.layout.shards[dist.get_rank(self.group) if self.group is not None else 0]

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of this rank's shard."""
        start, stop = self.local_range
        return (stop - start, self.layout.num_cols)


@dataclass(frozen=True)
class OwnedParameter:
    """How one parameter is cut into the matrices that Newton-Schulz sees.

    Args:
        param: What :meth:`OwnerCompute.step` calls it by.
        matrix: Its row shards.
        tensor_group: Tensor-parallel ranks whose blocks are one matrix; None where each
            orthogonalizes its own.
        partition_dim: Dimension the tensor group cuts.
        split_shapes: Rows of a query group that go to query, key and value; None for one block.
    """

    param: torch.Tensor
    matrix: ShardedMatrix
    tensor_group: dist.ProcessGroup | None
    partition_dim: int | None
    split_shapes: tuple[int, ...] | None


class OwnerCompute:
    """Orthogonalize the parameters of an optimizer, each on one rank of their domain.

    A parameter that tensor-parallel ranks have copies of, such as a router, is one matrix for each
    of them, as for upstream: nothing keeps those copies equal but their equal gradients.

    Args:
        parameters: In the same order on all ranks.
        newton_schulz: Steps, coefficients, precision and scale.
        settings: Wire, sizes and cost model.
        busy_seconds: Newton-Schulz time of this rank in other optimizers.
        device: Where shards live.

    Raises:
        RuntimeError: On all ranks, when parameters are cut over different groups, do not split, or
            when ranks of the domain came to different plans.

    Attributes:
        plan: The exchange plan of the domain.
        seconds: Estimated Newton-Schulz time of this rank, ``busy_seconds`` included.

    Communication: at construction an all-gather of 64 bytes a rank, two flags and a hash, lists of
        ranks and of differences as objects, and new process groups where a domain or a cut matrix
        needs one.
    """

    def __init__(
        self,
        parameters: Sequence[OwnedParameter],
        newton_schulz: NewtonSchulzSettings,
        settings: ExchangeSettings,
        *,
        busy_seconds: float,
        device: torch.device,
    ) -> None:
        raise_where_any_rank_fails(_problems(parameters), None, device, "No optimizer was built.")
        first = parameters[0].matrix
        tensor_groups = [p.tensor_group for p in parameters if p.tensor_group is not None]
        domain = find_domain(
            first.group,
            tensor_groups[0] if tensor_groups else None,
            first.replicas,
            busy_seconds=busy_seconds,
            device=device,
        )
        wire = settings.wire_for(newton_schulz.is_bf16)
        cost = dataclasses.replace(
            CostModel.parse(settings.cost, CPU_RANKS if device.type == "cpu" else CostModel()),
            num_ns_steps=newton_schulz.steps,
        )
        matrices: list[MatrixLayout] = []
        self._params: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            tensor_rank = domain.tensor_rank if parameter.tensor_group is None else 0
            self._params[len(matrices) + tensor_rank] = parameter.param
            matrices += _matrices_of(parameter, domain)
        element_bytes = wire_bytes(wire, newton_schulz.is_bf16)
        assignment = assign(
            matrices, cost, element_bytes, max_parts=settings.max_parts, busy=domain.busy
        )
        self.plan = ExchangePlan(
            matrices, assignment, cost, element_bytes, bucket_elements=settings.bucket_elements
        )
        rank = dist.get_rank()
        self.seconds = assignment.load[rank]
        if domain.group is not None:
            raise_where_ranks_differ(
                [f"{settings} {newton_schulz.steps} steps wire {wire}", *self.plan.entries()],
                domain.group,
                device,
                "Muon exchange plan",
            )
        self._engine = Engine(
            self.plan,
            newton_schulz,
            wire=wire,
            rank=rank,
            group=domain.group,
            parts_groups=_parts_groups(self.plan, rank, device),
            device=device,
        )
        # Other ranks have no handler; further domains of the same kind look alike.
        if settings.log_plan and rank == domain.ranks[0]:
            for line in log_lines(self.plan):
                logger.info("%s", line)

    @property
    def staging_bytes(self) -> int:
        """Memory of the engine's buffers, bytes."""
        return self._engine.staging_bytes

    def step(
        self,
        update: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        apply: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Orthogonalize all parameters; see :meth:`Engine.step`, by parameter."""
        self._engine.step(
            lambda index, out: update(self._params[index], out),
            lambda index, rows: apply(self._params[index], rows),
        )


def _parts_groups(
    plan: ExchangePlan, rank: int, device: torch.device
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make the groups of ranks that share cut matrices, and use each once.

    A backend connects a group at its first collective, and what fails should fail here.
    """
    groups = new_groups(owners for owners in plan.sets_of_owners if rank in owners)
    for owners in sorted(groups):
        dist.all_reduce(torch.zeros(1, device=device), group=groups[owners])
    return groups


def _problems(parameters: Sequence[OwnedParameter]) -> list[str]:
    problems = []
    first = parameters[0].matrix
    for parameter in parameters:
        matrix = parameter.matrix
        if matrix.group is not first.group or matrix.replicas is not first.replicas:
            problems.append(
                f"{matrix.fqn}: expected the shard group of {first.fqn}, got another. Build one "
                "optimizer for dense parameters and one for experts"
            )
        try:
            qkv_blocks(matrix.layout.num_rows, parameter.split_shapes)
        except ValueError as error:
            problems.append(f"{matrix.fqn}: {error}")
    return problems


def _matrices_of(parameter: OwnedParameter, domain: Domain) -> list[MatrixLayout]:
    """Lay out the one matrix of a joined parameter, or that of each tensor-parallel rank."""
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
        )
        for index, holders in enumerate(domain.holders)
    ]
