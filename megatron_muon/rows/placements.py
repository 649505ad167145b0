# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The box of a DTensor that each rank holds, where torch has sharded it: integers.

No communication, and no tensor but the mesh's own table of ranks.
"""

import functools
import itertools
import math

from torch.distributed.tensor import DeviceMesh, DTensor, Partial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_muon.plan.layout import Box


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


def cutting_axes(placements: tuple[Placement, ...], dim: int) -> list[int]:
    """Return the axes of the mesh that torch shards a dimension over, in the order of sharding.

    Plain axes shard from left to right. A strided axis, left of them, shards the resulting shards:
    FSDP2 shards after tensor parallelism.
    """
    cutting = [axis for axis, each in enumerate(placements) if sharded_dim(each) == dim]
    return sorted(cutting, key=lambda axis: (is_strided(placements[axis]), axis))


# Layers have parameters of the same shapes: the ranks of a large mesh are visited once per shape.
@functools.lru_cache(maxsize=256)
def boxes_of_placements(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> dict[int, Box]:
    """Return the box of each rank of a mesh, for placements that FSDP2 makes."""
    axes = [cutting_axes(placements, dim) for dim in range(len(shape))]
    boxes: dict[int, Box] = {}
    # Read once: it is a property that makes a tensor.
    ranks_of_mesh = mesh.mesh
    for coordinate in itertools.product(*map(range, mesh.shape)):
        boxes[int(ranks_of_mesh[coordinate])] = tuple(
            _cut(size, [(mesh.size(axis), coordinate[axis]) for axis in axes[dim]])
            for dim, size in enumerate(shape)
        )
    return boxes


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
