# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Planned views of the parameters of an optimizer.

A plan needs a mesh and placements. A DTensor has both. For a plain tensor the user gives the group
of its replicas, and the tensor-parallel group if it has a ``partition_dim``, as in Transformer
Engine. A convolution is a matrix of its first dimension. The view is a DTensor without memory. For
parameters of Megatron-FSDP it covers the tensor-parallel ranks, with shards of one matrix or with
copies (replicas).
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron_muon.plan.layout import Box
from megatron_muon.rows.megatron_fsdp import (
    is_of_fsdp_v1,
    is_of_fsdp_v2,
    is_tensor_sharded,
    tensor_mesh,
)
from megatron_muon.rows.parameters import (
    PlannedParameter,
    as_dtensor,
    over_tensor_ranks,
    ranks_of_mesh,
    sharded_dim,
    tensor_shard_of,
    whole_box,
)
from megatron_muon.runtime.agreement import gather_objects, own_rank
from megatron_muon.runtime.tensors import local_tensor

# A parameter group, or settings of all of them, by key; state by parameter and key.
Group = Mapping[str, Any]
State = Mapping[torch.Tensor, Mapping[str, Any]]
# Modules of torch.compile, DDP, FSDP1, activation checkpointing and LoRA.
_WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_layer|"
    r"original_module|modules_to_save\.\w+)\."
)


def without_wrappers(name: str) -> str:
    """Return the name of a parameter without modules that wrap others."""
    return _WRAPPERS.sub("", name)


def as_split_sizes(sizes: Any) -> Any:  # noqa: ANN401 - not validated yet
    """Return split sizes with tuples for lists, which checkpoints make of tuples."""
    return tuple(sizes) if isinstance(sizes, list | tuple) else sizes


def planned_parameters(param_groups: Sequence[Group]) -> Iterator[PlannedParameter]:
    """Yield the parameters of groups, viewed as they are."""
    numbers = itertools.count()
    for group in param_groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            number = next(numbers)
            yield PlannedParameter(
                name or f"parameter {number}",
                param,
                param,
                as_split_sizes(group.get("split_sizes")),
                group.get("transposed", False),
                group.get("flatten", False),
            )


class _ViewFacts(NamedTuple):
    """Facts that a rank sends to all others.

    Args:
        device_type: Device of the mesh of its first parameter; None without parameters.
        replicas: Ranks with copies of its tensors.
        tensor_ranks: Ranks with the other shards of tensors that have a ``partition_dim``.
        sizes: Size of that dimension, by position of the parameter.
    """

    device_type: str | None
    replicas: tuple[int, ...]
    tensor_ranks: tuple[int, ...]
    sizes: dict[int, int]


def view_parameters(
    parameters: Sequence[PlannedParameter],
    process_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
) -> tuple[list[PlannedParameter], list[str], torch.device, torch.device]:
    """Plan the views of parameters; called by all ranks of the job together.

    Args:
        parameters: Viewed as they are; a rank may have none.
        process_group: Ranks with copies of this rank's plain tensors; None for no others.
        tensor_group: Ranks with the other shards of plain tensors that have a ``partition_dim``, in
            the order of the shards; None for no others.

    Returns:
        Parameters with a view; errors, as sentences, of the others and of process groups; devices
        of Newton-Schulz, and of shards, which FSDP2's ``CPUOffloadPolicy`` keeps on the CPU.

    Communication: a gather of objects over the job.
    """
    params = [parameter.param for parameter in parameters]
    device_type = None
    if params:
        first_mesh = getattr(params[0], "device_mesh", None)
        device_type = params[0].device.type if first_mesh is None else first_mesh.device_type
    sizes = {
        number: local_tensor(param).shape[dim]
        for number, param in enumerate(params)
        if (dim := partition_dim(param)) is not None and dim < param.ndim
    }
    mine = _ViewFacts(device_type, ranks_with(process_group), ranks_with(tensor_group), sizes)
    facts = gather_objects(mine)
    device = torch.device(next((fact.device_type for fact in facts if fact.device_type), "cpu"))
    if params and not dist.is_initialized():
        device = params[0].device
    elif device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    mesh: DeviceMesh | None = None
    problems: list[str] = []
    if process_group is not None or tensor_group is not None:
        mesh, problems = _plain_mesh(facts, process_group, tensor_group, device)
    viewed = []
    for number, parameter in enumerate(parameters):
        try:
            if mesh is None:
                view = _megatron_view(parameter)
            elif number in sizes and tensor_group is None:
                raise ValueError(
                    "expected tensor_group with a partition_dim of "
                    f"{partition_dim(parameter.param)}, got none. Pass the ranks that hold the "
                    "other shards, or a group of this rank alone"
                )
            else:
                # A missing size makes the tiling fail on all ranks.
                of_shards = [facts[rank].sizes.get(number, 0) for rank in mine.tensor_ranks]
                view = _plain_view(parameter, mesh, of_shards if number in sizes else None)
            viewed.append(_flattened(view) if parameter.flattens is True else view)
        except ValueError as error:
            problems.append(f"{parameter.name}: {error}")
    is_in_cpu_memory = any(local_tensor(param).device.type == "cpu" for param in params[:1])
    return viewed, problems, device, torch.device("cpu") if is_in_cpu_memory else device


def ranks_with(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of a group, in its order; this rank alone without one."""
    return (own_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))


def _plain_mesh(
    facts: Sequence[_ViewFacts],
    process_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[DeviceMesh | None, list[str]]:
    """Return the mesh of both process groups, or None and a problem."""
    mine = facts[own_rank()]
    grid = [facts[rank].tensor_ranks for rank in mine.replicas]
    columns = list(zip(*grid, strict=False))
    if len({len(row) for row in grid}) > 1 or any(
        (facts[rank].replicas, facts[rank].tensor_ranks) != (column, row)
        for row in grid
        for column, rank in zip(columns, row, strict=True)
    ):
        return None, [
            "process_group, tensor_group: expected ranks in a grid, whose rows are tensor groups "
            f"and whose columns are process groups, got {mine.tensor_ranks} and {mine.replicas} on "
            f"rank {own_rank()}. Pass both groups of one model"
        ]
    groups = [group for group in (process_group, tensor_group) if group is not None]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type), []
    mesh = DeviceMesh.from_group(
        groups,
        device.type,
        mesh=torch.tensor(grid, device="cpu"),
        mesh_dim_names=("replicas", "tensor"),
    )
    return mesh, []


def _plain_view(
    parameter: PlannedParameter, mesh: DeviceMesh, sizes: Sequence[int] | None
) -> PlannedParameter:
    """View a plain tensor on the mesh, given the sizes of its tensor-parallel shards."""
    if isinstance(parameter.param, DTensor):
        raise ValueError(
            "expected plain tensors with process_group or tensor_group, got a DTensor, which "
            "knows its ranks. Step DTensors with an optimizer of their own"
        )
    shape = list(parameter.param.shape)
    boxes: list[Box] = [whole_box(shape)] * mesh.size(mesh.ndim - 1)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    dim = partition_dim(parameter.param)
    if dim is not None and sizes is not None:
        stride = getattr(parameter.param, "partition_stride", 1)
        if parameter.split_sizes is not None and stride > 1:
            raise ValueError(
                f"split_sizes: expected none with a partition_stride of {stride}: its shards are "
                "not consecutive rows. Leave them out"
            )
        placements[-1] = Shard(dim)
        ends = list(itertools.accumulate(sizes, initial=0))
        boxes = [
            (*boxes[0][:dim], shard, *boxes[0][dim + 1 :]) for shard in itertools.pairwise(ends)
        ]
        shape[dim] = ends[-1]
    # Tensor parallelism is the last axis of the mesh.
    boxes_by_rank = dict(zip(ranks_of_mesh(mesh), itertools.cycle(boxes), strict=False))
    view = as_dtensor(parameter.param, mesh, placements, shape)
    return replace(parameter, view=view, known_boxes=boxes_by_rank)


def partition_dim(param: torch.Tensor) -> int | None:
    """Return the dimension that Megatron or Transformer Engine shards, or None."""
    dim = getattr(param, "partition_dim", -1)
    # Both set it on all ranks, with this mark for sharded parameters.
    is_cut = getattr(param, "tensor_model_parallel", True)
    return dim if is_cut and isinstance(dim, int) and dim >= 0 else None


def _megatron_view(parameter: PlannedParameter) -> PlannedParameter:
    """View a DTensor of Megatron-FSDP over its tensor-parallel ranks; leave others as they are."""
    param = parameter.param
    if not isinstance(param, DTensor):
        return parameter
    is_v2 = is_of_fsdp_v2(param)
    if not is_v2 and not is_of_fsdp_v1(param):
        # Version 1 marks DTensors of its shards by the first, its
        # update_uneven_dtensor_chunk_metadata() by the second.
        if hasattr(param, "__fsdp_param__") or hasattr(
            param._local_tensor, "__create_chunk_list__"
        ):
            raise ValueError(
                "expected a parameter of a model of Megatron-FSDP, whose buffer says which rows "
                "ranks hold, got a DTensor made of its shards. Pass the parameter"
            )
        return parameter
    shard = tensor_shard_of(parameter)
    mesh = None if is_v2 else tensor_mesh(param)
    if mesh is None:
        return shard
    dim = sharded_dim(param.placements[-1]) if is_tensor_sharded(param) else None
    viewed = over_tensor_ranks(shard, mesh, dim)
    if viewed.view.shape != param.shape:
        raise ValueError(
            f"expected equal parts on all tensor-parallel ranks of shape {tuple(param.shape)}, got "
            f"{tuple(shard.view.shape)} here. Choose sizes that divide"
        )
    return viewed


def _flattened(parameter: PlannedParameter) -> PlannedParameter:
    """View a tensor as a matrix of its first dimension and all others."""
    view, local = parameter.view, local_tensor(parameter.param)
    if view.ndim <= 2:
        return parameter
    if not local.is_contiguous():
        raise ValueError(
            f"flatten: expected a contiguous tensor, got strides {local.stride()}. Call "
            "contiguous() on the parameter, which channels_last is not"
        )
    num_cols = math.prod(view.shape[1:])
    # FSDP2 sometimes makes all sizes of an empty shard 0.
    matrix = local.detach().reshape(local.shape[0] if local.numel() else 0, num_cols)
    if not isinstance(view, DTensor):
        return replace(parameter, view=matrix)
    if any(sharded_dim(placement) not in (None, 0) for placement in view.placements):
        raise ValueError(
            f"flatten: expected shards of dimension 0, got {view.placements}. Shard it so"
        )
    boxes = parameter.known_boxes
    if boxes is not None:
        boxes = {rank: (box[0], (0, num_cols)) for rank, box in boxes.items()}
    view = as_dtensor(matrix, view.device_mesh, view.placements, [view.shape[0], num_cols])
    return replace(parameter, view=view, known_boxes=boxes)
