# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Views of the parameters of an optimizer, as they are planned.

A plan needs a mesh and placements. A DTensor has both. For a plain tensor the user gives the group
of its replicas, and the tensor-parallel group if it has a ``partition_dim``, as in Transformer
Engine. A convolution is a matrix of its first dimension. The view is a DTensor without memory. For
parameters of Megatron-FSDP it covers the tensor-parallel ranks, with shards of one matrix or with
copies, which are replicas.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron_muon.plan.layout import Box
from megatron_muon.rows.megatron_fsdp import is_joined, is_of_fsdp_v1, is_of_fsdp_v2, tensor_mesh
from megatron_muon.rows.parameters import (
    PlannedParameter,
    as_dtensor,
    over_tensor_ranks,
    ranks_of_mesh,
    sharded_dim,
    tensor_shard_of,
    whole_box,
)
from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.tensors import local_tensor


def named_parameters(param_groups: Sequence[Mapping[str, Any]]) -> Iterator[PlannedParameter]:
    """Yield the parameters of groups, viewed as they are."""
    number = 0
    for group in param_groups:
        names = group.get("param_names") or [
            f"parameter {number + i}" for i in range(len(group["params"]))
        ]
        number += len(names)
        sizes = group.get("split_sizes")
        for name, param in zip(names, group["params"], strict=True):
            yield PlannedParameter(
                name,
                param,
                param,
                tuple(sizes) if isinstance(sizes, list | tuple) else sizes,
                group.get("transposed", False),
                group.get("flatten", False),
            )


def devices_of(param_groups: Sequence[Mapping[str, Any]]) -> tuple[torch.device, torch.device]:
    """Return where matrices are orthogonalized, the device of meshes, and where shards are.

    They differ with FSDP2's ``CPUOffloadPolicy``. A rank may have no parameters: ranks agree on the
    first by a gather of objects.
    """
    params = [param for group in param_groups for param in group["params"]]
    types = [
        param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
        for param in params[:1]
    ]
    if not dist.is_initialized():
        device = params[0].device if params else torch.device("cpu")
    else:
        of_ranks = [types] * dist.get_world_size()
        dist.all_gather_object(of_ranks, types)
        device = torch.device(next((each[0] for each in of_ranks if each), "cpu"))
        if device.type != "cpu":
            device = torch.device(
                device.type, torch.get_device_module(device.type).current_device()
            )
    is_in_cpu_memory = any(local_tensor(param).device.type == "cpu" for param in params[:1])
    return device, torch.device("cpu") if is_in_cpu_memory else device


@dataclass(frozen=True)
class PlainGroups:
    """Process groups of plain tensors: replicas, and tensor-parallel shards.

    Args:
        replicas: Ranks with copies of this rank's tensors; None for no others.
        tensor_ranks: Ranks with the other shards of tensors that have a ``partition_dim``, in the
            order of the shards; None for no others.
    """

    replicas: dist.ProcessGroup | None
    tensor_ranks: dist.ProcessGroup | None

    def viewed(
        self, parameters: Sequence[PlannedParameter], device: torch.device
    ) -> tuple[list[PlannedParameter], list[str]]:
        """View parameters as they are planned; called by all ranks of the job together.

        Returns:
            The parameters, and what is wrong with those that cannot be viewed, as sentences.

        Raises:
            RuntimeError: On all ranks, when the groups of one do not fit those of others.

        Communication: a gather of objects over the job; where a rank has groups a flag, and another
            gather over the tensor-parallel ranks.
        """
        mesh = self._agreed_mesh(device)
        problems: list[str] = []
        sizes = self._shard_sizes(parameters) if mesh is not None else {}
        viewed = []
        for number, each in enumerate(parameters):
            try:
                view = _megatron_view(each)
                if mesh is not None:
                    view = self._plain_view(each, mesh, sizes.get(number))
                if each.flattens is True and view.view.ndim > 2:
                    view = _flattened(view)
                viewed.append(view)
            except ValueError as error:
                problems.append(f"{each.name}: {error}")
        return viewed, problems

    def _agreed_mesh(self, device: torch.device) -> DeviceMesh | None:
        """Return the mesh of both groups, None without groups, or raise on all ranks."""
        if not dist.is_initialized():
            return None
        own = dist.get_rank()
        mine = [
            (own,) if group is None else tuple(dist.get_process_group_ranks(group))
            for group in (self.replicas, self.tensor_ranks)
        ]
        has_groups = self.replicas is not None or self.tensor_ranks is not None
        of_ranks: list[Any] = [None] * dist.get_world_size()
        # By all ranks: those that have no groups learn here that others have.
        dist.all_gather_object(of_ranks, [has_groups, *mine])
        if not any(each[0] for each in of_ranks):
            return None
        mesh: DeviceMesh | None = None
        problems: list[str] = []
        if has_groups:
            mesh, problems = self._mesh([each[1:] for each in of_ranks], device)
        raise_where_any_rank_fails(problems, None, device, "No optimizer was built.")
        return mesh

    def _mesh(
        self, of_ranks: Sequence[Sequence[tuple[int, ...]]], device: torch.device
    ) -> tuple[DeviceMesh | None, list[str]]:
        """Return the mesh of both groups, or a sentence that says why there is none.

        Args:
            of_ranks: By rank, the ranks of both groups.
            device: Of the mesh.
        """
        own = dist.get_rank()
        mine = of_ranks[own]
        replicas, _ = mine
        grid = [of_ranks[rank][1] for rank in replicas]
        columns = list(zip(*grid, strict=False))
        is_grid = len({len(row) for row in grid}) == 1 and all(
            list(of_ranks[rank]) == [columns[column], row]
            for row in grid
            for column, rank in enumerate(row)
        )
        if not is_grid:
            return None, [
                "process_group, tensor_group: expected ranks in a grid, whose rows are tensor "
                f"groups and whose columns are process groups, got {mine[1]} and {mine[0]} on rank "
                f"{own}. Pass both groups of one model"
            ]
        if self.replicas is None or self.tensor_ranks is None:
            group = self.tensor_ranks if self.replicas is None else self.replicas
            assert group is not None
            return DeviceMesh.from_group(group, device.type), []
        mesh = DeviceMesh.from_group(
            [self.replicas, self.tensor_ranks],
            device.type,
            mesh=torch.tensor(grid, device="cpu"),
            mesh_dim_names=("replicas", "tensor"),
        )
        return mesh, []

    def _shard_sizes(self, parameters: Sequence[PlannedParameter]) -> dict[int, list[int]]:
        """Return the sizes of all shards, by parameter with a ``partition_dim``."""
        mine = {
            number: local_tensor(each.param).shape[dim]
            for number, each in enumerate(parameters)
            if (dim := partition_dim(each.param)) is not None and dim < each.param.ndim
        }
        if self.tensor_ranks is None:
            return {number: [size] for number, size in mine.items()}
        of_ranks: list[Any] = [mine] * dist.get_world_size(self.tensor_ranks)
        dist.all_gather_object(of_ranks, mine, group=self.tensor_ranks)
        # A rank that lacks one makes the tiling fail, which is an error on all.
        return {number: [sizes.get(number, 0) for sizes in of_ranks] for number in mine}

    def _plain_view(
        self, each: PlannedParameter, mesh: DeviceMesh, sizes: list[int] | None
    ) -> PlannedParameter:
        """View a plain tensor on the mesh."""
        if isinstance(each.param, DTensor):
            raise ValueError(
                "expected plain tensors with process_group or tensor_group, got a DTensor, which "
                "knows its ranks. Step DTensors with an optimizer of their own"
            )
        shape = list(each.param.shape)
        boxes: list[Box] = [whole_box(shape)] * mesh.size(mesh.ndim - 1)
        placements: list[Placement] = [Replicate()] * mesh.ndim
        dim = partition_dim(each.param)
        if dim is not None and sizes is not None:
            if self.tensor_ranks is None:
                raise ValueError(
                    f"expected tensor_group with a partition_dim of {dim}, got none. Pass the "
                    "ranks that hold the other shards, or a group of this rank alone"
                )
            if each.split_sizes is not None and getattr(each.param, "partition_stride", 1) > 1:
                raise ValueError(
                    f"split_sizes: expected none with a partition_stride of "
                    f"{each.param.partition_stride}: its shards are not consecutive rows. Leave "  # type: ignore[attr-defined]
                    "them out"
                )
            placements[-1] = Shard(dim)
            ends = list(itertools.accumulate(sizes, initial=0))
            boxes = [
                (*boxes[0][:dim], shard, *boxes[0][dim + 1 :]) for shard in itertools.pairwise(ends)
            ]
            shape[dim] = ends[-1]
        # Tensor parallelism is the last axis of the mesh.
        of_ranks = dict(zip(ranks_of_mesh(mesh), itertools.cycle(boxes), strict=False))
        view = as_dtensor(each.param, mesh, placements, shape)
        return replace(each, view=view, known_boxes=of_ranks)


def partition_dim(param: torch.Tensor) -> int | None:
    """Return the dimension that Megatron or Transformer Engine shards, or None."""
    dim = getattr(param, "partition_dim", -1)
    # Both set it for all ranks, with this mark for one of a layer that is cut.
    is_cut = getattr(param, "tensor_model_parallel", True)
    return dim if is_cut and isinstance(dim, int) and dim >= 0 else None


def _megatron_view(each: PlannedParameter) -> PlannedParameter:
    """View a DTensor of Megatron-FSDP over its tensor-parallel ranks; leave others as they are."""
    param = each.param
    if not isinstance(param, DTensor) or not (
        is_of_fsdp_v1(param)
        or is_of_fsdp_v2(param)
        or hasattr(param, "__fsdp_param__")  # set by version 1
        # By its update_uneven_dtensor_chunk_metadata(), on DTensors of its shards.
        or hasattr(param._local_tensor, "__create_chunk_list__")
    ):
        return each
    if not is_of_fsdp_v1(param) and not is_of_fsdp_v2(param):
        raise ValueError(
            "expected a parameter of a model of Megatron-FSDP, whose buffer says which rows ranks "
            "hold, got a DTensor made of its shards. Pass the parameter"
        )
    part = tensor_shard_of(each)
    mesh = None if is_of_fsdp_v2(param) else tensor_mesh(param)
    if mesh is None:
        return part
    placement = param.placements[-1]
    viewed = over_tensor_ranks(part, mesh, sharded_dim(placement) if is_joined(param) else None)
    if viewed.view.shape != param.shape:
        raise ValueError(
            f"expected equal parts on all tensor-parallel ranks of shape {tuple(param.shape)}, got "
            f"{tuple(part.view.shape)} here. Choose sizes that divide"
        )
    return viewed


def _flattened(each: PlannedParameter) -> PlannedParameter:
    """View a tensor as a matrix of its first dimension and all others."""
    view, local = each.view, local_tensor(each.param)
    if not local.is_contiguous():
        raise ValueError(
            f"flatten: expected a contiguous tensor, got strides {local.stride()}. Call "
            "contiguous() on the parameter, which channels_last is not"
        )
    num_cols = math.prod(view.shape[1:])
    # FSDP2 sometimes makes all sizes of an empty shard 0.
    matrix = local.detach().reshape(local.shape[0] if local.numel() else 0, num_cols)
    if not isinstance(view, DTensor):
        return replace(each, view=matrix)
    if any(sharded_dim(placement) not in (None, 0) for placement in view.placements):
        raise ValueError(
            f"flatten: expected shards of dimension 0, got {view.placements}. Shard it so"
        )
    boxes = each.known_boxes
    if boxes is not None:
        boxes = {rank: (box[0], (0, num_cols)) for rank, box in boxes.items()}
    view = as_dtensor(matrix, view.device_mesh, view.placements, [view.shape[0], num_cols])
    return replace(each, view=view, known_boxes=boxes)
