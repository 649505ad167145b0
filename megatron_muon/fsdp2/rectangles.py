# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which rectangle of a tensor each rank holds: integers from mesh and placements.

No communication, and no tensor but the mesh's own table of ranks.
"""

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Partial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_muon.runtime.agreement import own_rank

# Range (start, stop) in each dimension of the tensor.
type Box = tuple[tuple[int, int], ...]


class Rectangles(NamedTuple):
    """Where the elements of one tensor lie.

    Args:
        boxes: What each rank of the mesh holds, by rank of the job.
        replicas: Ranks that differ in replicated axes alone, ascending, by rank of the job. Ranks
            with an empty box have replicas like all others.
    """

    boxes: dict[int, Box]
    replicas: dict[int, tuple[int, ...]]


def is_strided(placement: Placement) -> bool:
    """Return whether a placement is what FSDP2 makes of an axis left of a tensor-parallel one."""
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
        # What lies further right was sharded first; the factor says by how many.
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


def rectangles_of(param: torch.Tensor) -> Rectangles:
    """Return where a parameter lies; a plain tensor lies on this rank.

    Raises:
        ValueError: FSDP2 does not make such placements.
    """
    if not isinstance(param, DTensor):
        # parameter_problem() has refused it in a job of several ranks.
        rank = own_rank()
        return Rectangles({rank: tuple((0, size) for size in param.shape)}, {rank: (rank,)})
    problem = placement_problem(param.device_mesh, param.placements)
    if problem is not None:
        raise ValueError(problem)
    return rectangles(param.device_mesh, param.placements, tuple(param.shape))


def cutting_axes(placements: tuple[Placement, ...], dim: int) -> list[int]:
    """Return the axes of the mesh that cut a dimension, in the order in which they do.

    Plain axes cut from left to right. A strided axis, left of them, cuts what they have left: FSDP2
    shards what tensor parallelism has sharded before.
    """
    cutting = [axis for axis, each in enumerate(placements) if sharded_dim(each) == dim]
    return sorted(cutting, key=lambda axis: (is_strided(placements[axis]), axis))


# Layers have parameters of the same shapes: a mesh of thousands of ranks is gone through once for
# each.
@functools.lru_cache(maxsize=256)
def rectangles(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> Rectangles:
    """Return where a tensor of a shape lies, with placements that FSDP2 makes."""
    axes = [cutting_axes(placements, dim) for dim in range(len(shape))]
    boxes: dict[int, Box] = {}
    # By coordinate on the axes that are not replicated. Not by box: all empty shards have one.
    alike: dict[tuple[int, ...], list[int]] = {}
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
        alike.setdefault(sharded, []).append(rank)
    groups = [tuple(sorted(ranks)) for ranks in alike.values()]
    return Rectangles(boxes, {rank: ranks for ranks in groups for rank in ranks})


def _cut(size: int, cuts: list[tuple[int, int]]) -> tuple[int, int]:
    """Return what is left of a range.

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
    """Return what torch says that this rank holds, as checkpoints are written; None for nothing."""
    # Megatron-FSDP records uneven chunks on the local tensor; torch's own method knows even ones.
    create = getattr(param._local_tensor, "__create_chunk_list__", param.__create_chunk_list__)
    for chunk in create():
        if 0 not in chunk.sizes:
            return tuple(
                (start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
    return None


def has_recorded_chunks(param: torch.Tensor) -> bool:
    """Return whether a DTensor is sharded unevenly, as Megatron-FSDP does outside of Megatron."""
    return isinstance(param, DTensor) and hasattr(param._local_tensor, "__create_chunk_list__")
