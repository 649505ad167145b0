# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sharded over process groups, laid out as the matrices of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.plan.layout import MatrixLayout, block_rows, whole_matrix
from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.domain import Grid, find_grid
from megatron_muon.runtime.owner_compute import PlanInput
from megatron_muon.runtime.sharded_matrix import ShardedMatrix


@dataclass(frozen=True)
class OwnedParameter:
    """One parameter, and which matrices Newton-Schulz sees of it.

    Args:
        param: The parameter.
        matrix: Its row shards.
        tensor_group: Tensor-parallel ranks whose parameters are one joined matrix; None if they are
            orthogonalized separately.
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


def lay_out(parameters: Sequence[OwnedParameter], device: torch.device) -> PlanInput:
    """Lay out expert or dense parameters for a plan; called by all ranks together.

    A parameter that tensor-parallel ranks replicate, such as a router, is one matrix per rank, as
    upstream has it. Equal gradients keep these copies equal: they are orthogonalized whole, by the
    same operations, whatever the plans of these ranks are. Only norms on the bf16 wire may differ,
    as rarely as docs/numerics.md says.

    Args:
        parameters: In the same order on all ranks that share them, and sharded over the same
            groups. A pipeline stage may have none.
        device: Where shards live.

    Raises:
        RuntimeError: On all ranks, when parameters are sharded over different groups, or have rows
            that are no whole number of query groups.

    Communication: a flag, and that of :func:`~megatron_muon.runtime.domain.find_grid`.
    """
    raise_where_any_rank_fails(_problems(parameters), None, device, "No optimizer was built.")
    if not parameters:
        # This rank is alone, and joins the collectives of the others.
        return PlanInput(find_grid(None, None, None, device=device), [], {}, None)
    # All parameters share these groups, which was just checked. A tensor group is found on those
    # that are joined.
    first = parameters[0].matrix
    tensor_groups = [p.tensor_group for p in parameters if p.tensor_group is not None]
    grid = find_grid(
        first.shard_group,
        tensor_groups[0] if tensor_groups else None,
        first.replica_group,
        first.holder_group,
        device=device,
    )
    matrices: list[MatrixLayout] = []
    handles: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        # Joined, all tensor ranks have the one matrix. Otherwise there is one per rank, in order.
        tensor_rank = grid.tensor_rank if parameter.tensor_group is None else 0
        if parameter.matrix.local_shape[0]:
            handles[len(matrices) + tensor_rank] = parameter.param
        matrices += _matrices_of(parameter, grid)
    return PlanInput(grid, matrices, handles, first.replica_group)


def _problems(parameters: Sequence[OwnedParameter]) -> list[str]:
    problems = []
    # One domain has one grid of ranks: parameters of other groups need another OwnerCompute.
    for parameter in parameters:
        matrix, first = parameter.matrix, parameters[0].matrix
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


def _matrices_of(parameter: OwnedParameter, grid: Grid) -> list[MatrixLayout]:
    """Return the one matrix of a joined parameter, or that of each tensor-parallel rank."""
    matrix = parameter.matrix
    if parameter.tensor_group is not None:
        return [
            whole_matrix(
                matrix.fqn,
                matrix.layout,
                grid.holders,
                partition_dim=parameter.partition_dim,
                split_shapes=parameter.split_shapes,
                domain=grid.ranks,
            )
        ]
    return [
        whole_matrix(
            matrix.fqn if len(grid.holders) == 1 else f"{matrix.fqn} (tensor rank {index})",
            matrix.layout,
            [holders],
            split_shapes=parameter.split_shapes,
            has_copies=parameter.has_copies,
        )
        for index, holders in enumerate(grid.holders)
    ]
