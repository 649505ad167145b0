# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read the parameters, row shards and groups of a model that Megatron-FSDP v2 shards.

Only meshes, placements and layouts of buffers are read. Upstream's wrapper decides what of them
there is: in Megatron-LM main of 2026-08-22 ZeRO-3 on one axis, with expert parallelism.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from megatron_muon.plan.layout import RowLayout
from megatron_muon.runtime.fsdp_v2_layout import is_of_fsdp_v2, rows_by_rank, unsharded_of
from megatron_muon.runtime.groups import Wanted, find_groups
from megatron_muon.runtime.sharded_matrix import ShardedMatrix

# Process groups by their ranks, ascending; None for a rank alone.
type Groups = dict[tuple[int, ...], dist.ProcessGroup | None]


def is_v2(model: torch.nn.Module) -> bool:
    """Return whether Megatron-FSDP v2 shards a model."""
    return any(map(is_of_fsdp_v2, model.parameters()))


def copy_attributes(param: Any) -> None:
    """Copy Megatron's attributes to a sharded parameter from the one that modules see.

    Optimizers read them there. One more marks the parameter, see :func:`mark`.
    """
    for name, value in vars(unsharded_of(param)).items():
        if not name.startswith("_"):
            setattr(param, name, value)
    mark(param)


def mark(param: Any) -> None:
    """Mark a parameter as Megatron-FSDP v1 does: its gradient is a shard, to be counted once."""
    param.__fsdp_param__ = True


def is_sharded_over_instances(model: torch.nn.Module, ddp_config: Any) -> bool:
    """Return whether all instances of the optimizer hold different shards.

    Their number does not tell: the wrapper may shard over all data-parallel ranks all the same.
    """
    return ddp_config.num_distributed_optimizer_instances > 1 and all(
        placement.is_shard()
        for param in model.parameters()
        for placement in param.placements  # type: ignore[attr-defined]
    )


def find_shard_groups(params: Iterable[DTensor], known: Iterable[Any]) -> Groups:
    """Return the groups over which parameters are sharded, and those of their replicas.

    Args:
        params: Sharded parameters.
        known: Groups of the model, which may be the ones.

    Communication: that of :func:`~megatron_muon.runtime.groups.find_groups`.
    """
    wanted: dict[tuple[int, ...], list[Any]] = {}
    for param in params:
        mesh = param.device_mesh
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        for ranks in _shard_and_replica_ranks(param):
            wanted.setdefault(ranks, [*groups, *known])
    found = find_groups([Wanted(ranks, groups) for ranks, groups in wanted.items()])
    return dict(zip(wanted, found, strict=True))


def groups_of_mesh(param: DTensor) -> Groups:
    """Return the groups of a parameter that is sharded over a mesh of one axis."""
    ranks, replicas = _shard_and_replica_ranks(param)
    return {ranks: param.device_mesh.get_group(), replicas: None}


def describe_matrix(fqn: str, param: DTensor, groups: Groups) -> ShardedMatrix:
    """Read the row shards of a matrix from the layout of its buffer.

    Args:
        fqn: Name of the parameter.
        param: Sharded parameter, 2-D.
        groups: Of :func:`find_shard_groups`.

    Raises:
        ValueError: The shards do not cover the rows once.

    Communication: none.
    """
    ranks, replicas = _shard_and_replica_ranks(param)
    rows = rows_by_rank(param)
    layout = RowLayout(param.shape[0], param.shape[1], tuple(rows[rank] for rank in ranks))
    return ShardedMatrix(fqn, layout, groups[ranks], groups[replicas])


def _shard_and_replica_ranks(param: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks with the shards of this rank's replica, and those with its own shard."""
    is_shard = [placement.is_shard() for placement in param.placements]
    return (
        _ranks_along(param.device_mesh, is_shard),
        _ranks_along(param.device_mesh, [not each for each in is_shard]),
    )


def _ranks_along(mesh: DeviceMesh, is_free: list[bool]) -> tuple[int, ...]:
    """Return the ranks, ascending, that differ from this one in some axes of a mesh alone."""
    own = mesh.get_coordinate()
    assert own is not None, "expected a rank of the mesh"
    index = tuple(slice(None) if free else at for free, at in zip(is_free, own, strict=True))
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))
