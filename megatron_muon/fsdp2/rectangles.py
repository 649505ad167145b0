# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which rectangle of a tensor each rank holds: integers, in the order of whoever cut it.

torch cuts evenly, and placements say in which order. Megatron-FSDP cuts a buffer of parameters: its
shards are uneven, and its placements do not say in which order the axes of the mesh have cut.
Version 2 keeps the layout of the buffer; of version 1 the shapes of all ranks' shards are needed.

No communication, and no tensor but the mesh's own table of ranks.
"""

import functools
import itertools
import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Partial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_muon.runtime.agreement import own_rank
from megatron_muon.runtime.fsdp_v2_layout import is_of_fsdp_v2, rows_by_rank

# Attribute of a view of a parameter whose rows follow from the shapes of all ranks' shards.
KNOWN_BY_SHAPES = "_megatron_muon_known_by_shapes"

# Range (start, stop) in each dimension of the tensor.
type Box = tuple[tuple[int, int], ...]


class Rectangles(NamedTuple):
    """The parts of one tensor on the ranks of its mesh.

    Args:
        boxes: What the ranks of the mesh hold, by rank of the job.
        replicas: Ranks that differ in replicated axes alone, ascending, by rank of the job. Ranks
            with an empty box have replicas too.
    """

    boxes: dict[int, Box]
    replicas: dict[int, tuple[int, ...]]


def is_strided(placement: Placement) -> bool:
    """Return whether FSDP2 has sharded a dimension that tensor parallelism had sharded before."""
    # No subclass of Shard: in torch 2.11 is_shard() is False for it.
    return isinstance(placement, _StridedShard)


def sharded_dim(placement: Placement) -> int | None:
    """Return the dimension of the tensor that an axis of the mesh shards, or None."""
    return placement.dim if is_strided(placement) or placement.is_shard() else None  # type: ignore[attr-defined]


def placement_problem(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> str | None:
    """Describe a placement that FSDP2 does not make, or return None."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            return f"expected a reduced tensor, got placements {placements}. Reduce it first"
        if not is_strided(placement):
            continue
        # Axes further right were sharded first; the factor is the product of their sizes.
        first = math.prod(
            mesh.size(other)
            for other in range(axis + 1, len(placements))
            if sharded_dim(placements[other]) == sharded_dim(placement)
            and not is_strided(placements[other])
        )
        same_dim = [p for p in placements if is_strided(p) and p.dim == placement.dim]  # type: ignore[attr-defined]
        if placement.split_factor != first or len(same_dim) > 1:  # type: ignore[attr-defined]
            return (
                f"expected a strided shard as fully_shard makes it, of split factor {first}, got "
                f"placements {placements}. Report them"
            )
    return None


def is_cut_by_torch(param: torch.Tensor) -> bool:
    """Return whether the placements of a parameter say which rows each rank holds."""
    return not isinstance(param, DTensor) or not (
        hasattr(param, "__fsdp_param__")  # set by Megatron-FSDP
        or is_of_fsdp_v2(param)
        or getattr(param, KNOWN_BY_SHAPES, False)
        # By its update_uneven_dtensor_chunk_metadata(), on DTensors of its shards.
        or hasattr(param._local_tensor, "__create_chunk_list__")
    )


def is_known_by_shapes(param: torch.Tensor) -> bool:
    """Return whether the rows of a parameter follow from the shapes of all ranks' shards."""
    return not is_cut_by_torch(param) and not is_of_fsdp_v2(param)


def rectangles_of(param: torch.Tensor, shapes: tuple[tuple[int, ...], ...] = ()) -> Rectangles:
    """Return the rectangles of a parameter; a plain tensor is whole on this rank.

    Args:
        param: Parameter whose placements have no :func:`placement_problem`.
        shapes: Of each rank's shard, in the order of the mesh, if it :func:`is_known_by_shapes`.
    """
    if not isinstance(param, DTensor):
        # parameter_problem() has refused it in a job of several ranks.
        rank = own_rank()
        return Rectangles({rank: tuple((0, size) for size in param.shape)}, {rank: (rank,)})
    mesh, placements = param.device_mesh, param.placements
    found = rectangles(mesh, placements, tuple(param.shape))
    if is_cut_by_torch(param):
        return found
    if is_of_fsdp_v2(param):
        whole = tuple((0, size) for size in param.shape[1:])
        boxes = {rank: (rows, *whole) for rank, rows in rows_by_rank(param).items()}
        return Rectangles(boxes, found.replicas)
    # Version 1 notes the order on the mesh where several axes shard a dimension; views of version 2
    # have its only one. Source: _get_fsdp_tensor_spec of megatron-core.
    order = tuple(getattr(mesh, "_shard_order", reversed(range(mesh.ndim))))
    return Rectangles(_boxes_in_order(mesh, placements, order, shapes), found.replicas)


@functools.lru_cache(maxsize=256)
def _boxes_in_order(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
) -> dict[int, Box]:
    """Return what each rank holds, where shards of any shapes follow one another.

    Args:
        mesh: Of the tensor.
        placements: Of the tensor.
        order: Axes of the mesh, the one that has cut first in front.
        shapes: Of the shards, in the order of the mesh.
    """
    coordinates = list(itertools.product(*map(range, mesh.shape)))
    boxes: list[Box] = [()] * len(shapes)
    for dim in range(len(shapes[0])):
        axes = [axis for axis in order if sharded_dim(placements[axis]) == dim]
        # Where the next shard starts, among ranks that differ in these axes alone.
        starts: dict[tuple[int, ...], int] = defaultdict(int)
        for i in sorted(range(len(shapes)), key=lambda i: [coordinates[i][a] for a in axes]):
            others = tuple(c for axis, c in enumerate(coordinates[i]) if axis not in axes)
            start = starts[others]
            starts[others] += shapes[i][dim]
            boxes[i] += ((start, starts[others]),)
    return dict(zip(mesh.mesh.flatten().tolist(), boxes, strict=True))


def cutting_axes(placements: tuple[Placement, ...], dim: int) -> list[int]:
    """Return the axes of the mesh that torch shards a dimension over, in the order of sharding.

    Plain axes shard from left to right. A strided axis, left of them, shards the resulting shards:
    FSDP2 shards after tensor parallelism.
    """
    cutting = [axis for axis, each in enumerate(placements) if sharded_dim(each) == dim]
    return sorted(cutting, key=lambda axis: (is_strided(placements[axis]), axis))


# Layers have parameters of the same shapes: the ranks of a large mesh are visited once per shape.
@functools.lru_cache(maxsize=256)
def rectangles(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> Rectangles:
    """Return the rectangles of a tensor with placements that FSDP2 makes."""
    axes = [cutting_axes(placements, dim) for dim in range(len(shape))]
    boxes: dict[int, Box] = {}
    # By coordinate on the axes that are not replicated. Not by box: all empty shards have one.
    by_shard: dict[tuple[int, ...], list[int]] = {}
    # Read once: it is a property that makes a tensor.
    ranks_of_mesh = mesh.mesh
    for coordinate in itertools.product(*map(range, mesh.shape)):
        rank = int(ranks_of_mesh[coordinate])
        boxes[rank] = tuple(
            _cut(size, [(mesh.size(axis), coordinate[axis]) for axis in axes[dim]])
            for dim, size in enumerate(shape)
        )
        sharded = tuple(
            index
            for index, placement in zip(coordinate, placements, strict=True)
            if not placement.is_replicate()
        )
        by_shard.setdefault(sharded, []).append(rank)
    groups = [tuple(sorted(ranks)) for ranks in by_shard.values()]
    return Rectangles(boxes, {rank: ranks for ranks in groups for rank in ranks})


def _cut(size: int, cuts: list[tuple[int, int]]) -> tuple[int, int]:
    """Return one part of a range that is cut repeatedly.

    Args:
        size: Of the range, which starts at 0.
        cuts: Number of parts and index of the part, one cut after the other.
    """
    start, stop = 0, size
    for num_parts, index in cuts:
        # As torch.chunk: all parts but the last are of the same size, and last ones may be empty.
        step = -(-(stop - start) // num_parts)
        start, stop = min(stop, start + index * step), min(stop, start + (index + 1) * step)
    return start, stop


def own_box(param: DTensor) -> Box | None:
    """Return what this rank holds according to torch's checkpoints; None for nothing."""
    for chunk in param.__create_chunk_list__():
        if 0 not in chunk.sizes:
            return tuple(
                (start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
    return None
