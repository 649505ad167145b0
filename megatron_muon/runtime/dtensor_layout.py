# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Local rows of a DTensor, and its row shards where it lies in no buffer of Megatron-FSDP."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.plan.layout import RowLayout
from megatron_muon.runtime.sharded_matrix import ShardedMatrix


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank, without a view of their own; a plain tensor itself.

    ``DTensor.to_local`` makes a view, and passes through autograd and the dispatcher to do so.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def describe_dtensor(fqn: str, param: DTensor) -> ShardedMatrix:
    """Read which rows each rank holds from the offsets that checkpoints are written by.

    Args:
        fqn: Name of the parameter.
        param: 2-D, rows sharded over at most one axis of its mesh, evenly as torch does or
            unevenly as Megatron-FSDP records; replicated over at most one other.

    Returns:
        Its matrix. A tensor-parallel offset, the same on all ranks of the axis, is taken off.

    Raises:
        ValueError: Another number of dimensions or another placement; or, on all ranks of the
            axis, chunks that do not tile the rows or are not those of the shards.

    Communication: one all-gather of 24 bytes a rank over the sharded axis.
    """
    if param.ndim != 2:
        raise ValueError(
            f"{fqn}: expected a 2-D DTensor, got {param.ndim} dimensions. Reshape it to a matrix, "
            "or step it with another optimizer."
        )
    num_cols = param._local_tensor.shape[1]
    axes: dict[str, list[dist.ProcessGroup]] = {"shard": [], "replicate": []}
    is_supported = True
    for axis, placement in enumerate(param.placements):
        if placement.is_shard(0):
            axes["shard"].append(param.device_mesh.get_group(axis))
        elif not placement.is_replicate():
            is_supported = False
        elif param.device_mesh.size(axis) > 1:
            axes["replicate"].append(param.device_mesh.get_group(axis))
    if not is_supported or len(axes["shard"]) > 1 or len(axes["replicate"]) > 1:
        raise ValueError(
            f"{fqn}: expected rows sharded over one mesh axis and replicated over at most one, got "
            f"placements {param.placements}. Wrap the model in Megatron-FSDP, or describe the "
            "matrix by a ShardedMatrix of its own."
        )
    replicas = axes["replicate"][0] if axes["replicate"] else None
    if not axes["shard"]:
        num_rows = param._local_tensor.shape[0]
        return ShardedMatrix(fqn, RowLayout(num_rows, num_cols, ((0, num_rows),)), None, replicas)

    group = axes["shard"][0]
    # Megatron-FSDP records uneven chunks on the local tensor; torch's own method knows even ones.
    create = getattr(param._local_tensor, "__create_chunk_list__", param.__create_chunk_list__)
    chunks = create()
    offset, rows = (chunks[0].offsets[0], chunks[0].sizes[0]) if chunks else (0, 0)
    local_rows = param._local_tensor.shape[0]
    mine = torch.tensor([offset, rows, local_rows], device=param._local_tensor.device)
    table = mine.new_empty(dist.get_world_size(group), 3)
    dist.all_gather_into_tensor(table.view(-1), mine, group=group)
    if not torch.equal(table[:, 1], table[:, 2]):
        raise ValueError(
            f"{fqn}: expected chunks of {table[:, 2].tolist()} rows by rank, as the shards have, "
            f"got {table[:, 1].tolist()}. Call update_uneven_dtensor_chunk_metadata on it first."
        )
    # Offsets are global: with tensor parallelism in rows the smallest one is not 0.
    first = min((start for start, count, _ in table.tolist() if count), default=0)
    shards = tuple(
        (start - first, start - first + count) if count else (0, 0)
        for start, count, _ in table.tolist()
    )
    return ShardedMatrix(fqn, RowLayout(int(table[:, 1].sum()), num_cols, shards), group, replicas)
