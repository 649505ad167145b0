# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The rows of a parameter in the flat buffer of Megatron-FSDP, versions 1 and 2.

Both lay the tensors of a parameter group out in one buffer. Its segments, one per rank, have one
size and end at whole rows. Rows of all ranks follow from integers, without communication.
Of version 2 both generations are read: ``megatron_fsdp.experimental`` and Megatron-LM main.
"""

import functools
import itertools
import math
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from megatron_muon.plan.layout import Box, Range, Ranks, holders_of_segments, rows_in_buffer
from megatron_muon.runtime.agreement import own_rank

_GROUP = "_mfsdp_parameter_group"
_SUBMESH = "_megatron_muon_without_tensor_axis"


def is_of_fsdp_v1(param: object) -> bool:
    """Return whether version 1 of Megatron-FSDP has sharded a parameter."""
    return hasattr(param, "_megatron_fsdp_model") and hasattr(param, "orig_param")


def is_of_fsdp_v2(param: object) -> bool:
    """Return whether version 2 of Megatron-FSDP has sharded a parameter."""
    return hasattr(param, _GROUP)


def _group_of(param: DTensor) -> Any:  # noqa: ANN401 - a class of megatron
    """Return the group of a parameter, or None if its model is gone."""
    group = getattr(param, _GROUP)
    # Main's is a weak reference, so that parameters do not keep modules alive.
    return group() if isinstance(group, weakref.ref) else group


def place_of(param: DTensor) -> tuple[Any, int]:
    """Return the group of a sharded parameter, and the index of the parameter in it.

    Raises:
        ValueError: The model is gone, or the parameter is a copy.
    """
    group = _group_of(param)
    for index, parameter in enumerate(_parameters(group)):
        # == of DTensors compares values.
        if parameter.sharded is param:
            return group, index
    raise ValueError(
        "expected a parameter of a model that exists, got one of none. Keep the model, and pass "
        "its parameters"
    )


def unsharded_of(param: DTensor) -> torch.Tensor:
    """Return the gathered tensor that replaces a sharded parameter in a forward pass."""
    group, index = place_of(param)
    return _parameters(group)[index].unsharded


class _Parameter(NamedTuple):
    name: str
    sharded: DTensor
    unsharded: torch.Tensor


def _parameters(group: Any) -> list[_Parameter]:  # noqa: ANN401 - a class of megatron
    """Return the parameters of a group; none of None."""
    if hasattr(group, "fsdp_parameters"):
        return [_Parameter(p.fqns[0], p.sharded, p.unsharded) for p in group.fsdp_parameters]
    if group is None:
        return []
    names = (group.parameter_names, group.sharded_parameters, group.unsharded_parameters)
    return list(itertools.starmap(_Parameter, zip(*names, strict=True)))


def names_that_block_gradients(param: DTensor) -> tuple[object, list[str]]:
    """Return the module of a parameter, and the parameters that block its gradient reduction.

    Megatron-FSDP reduces no gradient of a module until all of its parameters have one. If some
    have, the others are named.
    """
    group = _group_of(param)
    if group is None:
        return None, []
    module = group._owning_module() if hasattr(group, "_owning_module") else group.owning_module
    waiting = [
        parameter
        for one in module._parameter_groups
        if one.requires_grad
        for parameter in _parameters(one)
    ]
    missing = [parameter.name for parameter in waiting if parameter.unsharded.grad is None]
    return module, missing if len(missing) < len(waiting) else []


def tensor_shard_shape(param: Any) -> torch.Size:  # noqa: ANN401 - with attributes of megatron
    """Return the shape of a parameter on its tensor-parallel rank, over all ranks of its shards."""
    whole = getattr(param, "orig_param", param)
    is_part = whole is not param and isinstance(whole, DTensor)
    shape: torch.Size = whole.to_local().shape if is_part else whole.shape
    return shape


def is_tensor_sharded(param: Any) -> bool:  # noqa: ANN401
    """Return whether a parameter is tensor-parallel over the last axis of its mesh."""
    return tuple(param.shape) != tuple(tensor_shard_shape(param))


def tensor_shard_layout(param: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements of a parameter on its tensor-parallel rank."""
    mesh, placements = param.device_mesh, tuple(param.placements)
    if is_tensor_sharded(param):
        mesh, placements = _without_last_axis(mesh), placements[:-1]
    # ZeRO-0 with several instances of the optimizer has one placement for two axes in version 1.
    return mesh, placements + (Replicate(),) * (mesh.ndim - len(placements))


def _without_last_axis(mesh: Any) -> DeviceMesh:  # noqa: ANN401 - gets an attribute
    # Not in a cache: it would return the submesh of an equal mesh with destroyed process groups.
    if not hasattr(mesh, _SUBMESH):
        assert mesh.mesh_dim_names is not None, "Megatron-FSDP names the axes of its meshes"
        setattr(mesh, _SUBMESH, mesh[mesh.mesh_dim_names[:-1]])
    submesh: DeviceMesh = getattr(mesh, _SUBMESH)
    return submesh


def tensor_mesh(param: Any) -> DeviceMesh | None:  # noqa: ANN401
    """Return the mesh of a parameter with tensor parallelism as its last axis.

    None if version 1 has no such axis, and for experts: tensor parallelism never replicates them.
    """
    if is_tensor_sharded(param):
        mesh: DeviceMesh = param.device_mesh
        return mesh
    index = param._megatron_fsdp_model.param_and_grad_buffer.dist_index
    if index.tp_dim is None or _group_in_v1(param).is_expert_param:
        return None
    mesh = index.get_submesh((*param.device_mesh.mesh_dim_names, index.tp_dim))
    return mesh if mesh.size(mesh.ndim - 1) > 1 else None


def tensor_shard_boxes(param: DTensor) -> dict[int, Box]:
    """Return the box of a tensor-parallel shard by rank; ranks without rows are left out.

    Layers share their boxes: a buffer over thousands of ranks is visited once.

    Raises:
        ValueError: A shard ends inside a row, or this rank holds another segment than expected.
    """
    mesh, placements = tensor_shard_layout(param)
    axes = tuple(axis for axis, placement in enumerate(placements) if placement.is_shard())
    shape = tuple(tensor_shard_shape(param))
    if not axes:
        size, begin = max(1, math.prod(shape)), 0
    elif is_of_fsdp_v2(param):
        group, index = place_of(param)
        layout = group.main_weight.layout
        size, begin = layout.size, layout.tensor_to_offset[index]
    else:
        size, begin = _place_in_v1(param, _holders(mesh, axes))
    return boxes_in_buffer(mesh, axes, size, begin, shape)


def own_rows(param: DTensor) -> Range:
    """Return the rows of a tensor-parallel shard that this rank holds."""
    return tensor_shard_boxes(param).get(own_rank(), ((0, 0),))[0]


def shard_group(param: DTensor) -> dist.ProcessGroup | None:
    """Return the process group that shards the buffer of a parameter, or None.

    With version 2 the mesh must have one axis.
    """
    mesh, placements = tensor_shard_layout(param)
    if not any(placement.is_shard() for placement in placements):
        return None
    group: dist.ProcessGroup = (
        mesh.get_group() if is_of_fsdp_v2(param) else _buffer_in_v1(param).data_parallel_group
    )
    return group


# Groups of layers share meshes: the ranks of a large one are visited once.
@functools.lru_cache(maxsize=64)
def _holders(mesh: DeviceMesh, axes: tuple[int, ...]) -> list[Ranks]:
    return holders_of_segments(mesh.shape, mesh.mesh.flatten().tolist(), axes)


# A layer has hundreds of tensors if it has experts.
@functools.lru_cache(maxsize=1024)
def boxes_in_buffer(
    mesh: DeviceMesh, axes: tuple[int, ...], size: int, begin: int, shape: tuple[int, ...]
) -> dict[int, Box]:
    """Return boxes by rank of a tensor in a buffer that a mesh shards; see ``rows_in_buffer()``."""
    num_rows, *others = shape
    rows = rows_in_buffer(_holders(mesh, axes), size, begin, num_rows, math.prod(others))
    return {rank: (held, *((0, length) for length in others)) for rank, held in rows.items()}


def _group_in_v1(param: Any) -> Any:  # noqa: ANN401
    buffers = param._megatron_fsdp_model.param_and_grad_buffer
    return buffers.parameter_groups[buffers.param_to_param_group[param.orig_param]]


def _buffer_in_v1(param: DTensor) -> Any:  # noqa: ANN401
    group = _group_in_v1(param)
    # Optimizer states follow main weights; with fp32 parameters the model's are the main ones.
    return group.main_weight_buffer or group.model_weight_buffer


def _place_in_v1(param: Any, holders: list[Ranks]) -> tuple[int, int]:  # noqa: ANN401
    """Return the size of the buffer of a parameter, and its first element there."""
    buffer = _buffer_in_v1(param)
    # The order of segments is no interface of Megatron-FSDP, so every rank checks it.
    expected = holders[buffer.dp_rank]
    if own_rank() not in expected:
        raise ValueError(
            f"expected one of ranks {expected[:8]} with shard {buffer.dp_rank} of the buffer, got "
            f"rank {own_rank()}. This Megatron-FSDP orders shards in another way; report it"
        )
    begin = buffer.item_index_map[buffer.param_idx[param.orig_param]].global_data_index
    return buffer.bucket_index.size, begin
