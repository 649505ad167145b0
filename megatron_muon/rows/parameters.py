# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Planned parameters, and their boxes by rank.

Boxes follow from placements where torch has sharded a parameter, and from Megatron-FSDP's buffer
otherwise: integers, without communication.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_muon.plan.layout import Box, Ranks, holders_of_segments
from megatron_muon.rows.megatron_fsdp import (
    is_of_fsdp_v1,
    is_of_fsdp_v2,
    tensor_shard_boxes,
    tensor_shard_layout,
    tensor_shard_shape,
)
from megatron_muon.runtime.agreement import own_rank
from megatron_muon.runtime.tensors import as_shard

type Placements = tuple[Placement, ...]
type SplitSizes = int | tuple[int, ...] | None


def is_strided(placement: Placement) -> bool:
    """Return whether FSDP2 has sharded a dimension that tensor parallelism had sharded before."""
    # No subclass of Shard: in torch 2.11 is_shard() is False for it.
    return isinstance(placement, _StridedShard)


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that an axis of the mesh shards, or None."""
    return placement.dim if is_strided(placement) or placement.is_shard() else None  # type: ignore[attr-defined]


def cutting_axes(placements: Placements, dim: int) -> list[int]:
    """Return the axes of the mesh that torch shards a dimension over, in the order of sharding.

    Plain axes shard from left to right. A strided axis, left of them, shards the resulting shards:
    FSDP2 shards after tensor parallelism.
    """
    cutting = [axis for axis, p in enumerate(placements) if sharded_dim(p) == dim]
    return sorted(cutting, key=lambda axis: (is_strided(placements[axis]), axis))


# Layers have parameters of the same shapes: the ranks of a large mesh are visited once per shape.
@functools.lru_cache(maxsize=256)
def boxes_of_placements(
    mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]
) -> dict[int, Box]:
    """Return boxes by rank of a mesh, for placements of FSDP2."""
    cuts = [(dim, axis) for dim in range(len(shape)) for axis in cutting_axes(placements, dim)]
    boxes: dict[int, Box] = {}
    coordinates = itertools.product(*map(range, mesh.shape))
    for rank, coordinate in zip(mesh.mesh.flatten().tolist(), coordinates, strict=True):
        box = [(0, size) for size in shape]
        for dim, axis in cuts:
            (start, stop), index = box[dim], coordinate[axis]
            # As torch.chunk does: shards have one size until the rows end; the last may be empty.
            size = -(-(stop - start) // mesh.size(axis))
            box[dim] = (min(stop, start + index * size), min(stop, start + (index + 1) * size))
        boxes[rank] = tuple(box)
    return boxes


def checkpointed_box(param: DTensor) -> Box | None:
    """Return the box of this rank in torch's checkpoints, or None."""
    for chunk in param.__create_chunk_list__():
        if 0 not in chunk.sizes:
            return tuple(
                (start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
    return None


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter of an optimizer, and its planned view.

    Args:
        name: Name, equal on all holders; identifies it in errors and in comparisons of ranks.
        param: The parameter of the model.
        view: Planned shape and sharding, without memory: 2-D, or 3-D for a batch of matrices.
        split_sizes: See ``output_slices()``.
        is_transposed: Whether matrices are stored as (inputs, outputs).
        flattens: Whether all dimensions but the first are columns.
        blocks: Rows of one group by block, such as query, key and value, in a matrix with one
            owner; instead of ``split_sizes``.
        known_boxes: Box of the view by rank of the job, if placements do not define it. Ranks
            without elements may be missing.
        state_prefix: Prefix of the names of state that the owner of a matrix keeps, and saves: all
            tensor-parallel ranks give their shards the name of the parameter.
    """

    name: str
    param: torch.Tensor
    view: torch.Tensor
    split_sizes: SplitSizes = None
    is_transposed: bool = False
    flattens: bool = False
    blocks: tuple[int, ...] | None = None
    known_boxes: Mapping[int, Box] | None = None
    state_prefix: str = ""

    @property
    def boxes(self) -> Mapping[int, Box]:
        """Box of the view by rank; a plain tensor is whole on this rank."""
        if self.known_boxes is not None:
            return self.known_boxes
        shape = tuple(self.view.shape)
        if not isinstance(self.view, DTensor):
            return {own_rank(): whole_box(shape)}
        return boxes_of_placements(self.view.device_mesh, tuple(self.view.placements), shape)

    @property
    def own_box(self) -> Box:
        """Box of this rank."""
        return self.boxes.get(own_rank(), ((0, 0), *whole_box(self.view.shape[1:])))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard of the view."""
        return tuple(stop - start for start, stop in self.own_box)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


@functools.lru_cache(maxsize=64)
def ranks_of_mesh(mesh: DeviceMesh) -> Ranks:
    """Return the ranks of a mesh, in its order."""
    return tuple(mesh.mesh.flatten().tolist())


@functools.lru_cache(maxsize=256)
def replicas_of(mesh: DeviceMesh, placements: Placements) -> tuple[Ranks, ...]:
    """Return the sets of ranks of a mesh that differ in replicated axes alone."""
    # Not ranks with equal boxes: all empty shards have one.
    sharding = [axis for axis, p in enumerate(placements) if not p.is_replicate()]
    return tuple(holders_of_segments(mesh.shape, ranks_of_mesh(mesh), sharding))


def as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Describe a local tensor as a DTensor without memory."""
    # On "meta": torch would copy a CPU tensor to the device of the mesh.
    return as_shard(local.detach().to("meta"), mesh, placements, shape)


def tensor_shard_of(parameter: PlannedParameter) -> PlannedParameter:
    """View the shard of a Megatron-FSDP parameter on its tensor-parallel rank; leave others.

    Raises:
        ValueError: Its buffer has another layout than expected.
    """
    param = parameter.param
    assert isinstance(param, DTensor)
    if not (is_of_fsdp_v1(param) or is_of_fsdp_v2(param)):
        return parameter
    (mesh, placements), shape = tensor_shard_layout(param), tensor_shard_shape(param)
    view = as_dtensor(param._local_tensor, mesh, placements, shape)
    return replace(parameter, view=view, known_boxes=tensor_shard_boxes(param))


def over_tensor_ranks(
    tensor_shard: PlannedParameter, mesh: DeviceMesh, dim: int | None
) -> PlannedParameter:
    """View a parameter over its tensor-parallel ranks, from its shard on this one.

    Args:
        tensor_shard: See ``tensor_shard_of()``.
        mesh: Mesh of the shard, with tensor parallelism as one more axis at the end.
        dim: Dimension that tensor parallelism shards; None for copies. They are replicas: a matrix
            is orthogonalized once, and they cannot differ.
    """
    assert isinstance(tensor_shard.view, DTensor)
    columns = mesh.mesh.flatten(0, -2).T.tolist()
    column = columns[mesh.get_local_rank(mesh.ndim - 1)]
    shape, placement = list(tensor_shard.view.shape), Replicate() if dim is None else Shard(dim)
    boxes: dict[int, Box] = {}
    for number, ranks in enumerate(columns):
        for rank, like in zip(ranks, column, strict=True):
            box = list(tensor_shard.boxes.get(like, ()))
            if box and dim is not None:
                start, stop = box[dim]
                box[dim] = (number * shape[dim] + start, number * shape[dim] + stop)
            if box:
                boxes[rank] = tuple(box)
    if dim is not None:
        shape[dim] *= len(columns)
    view = as_dtensor(
        tensor_shard.view._local_tensor, mesh, [*tensor_shard.view.placements, placement], shape
    )
    return replace(tensor_shard, view=view, known_boxes=boxes, state_prefix="")
