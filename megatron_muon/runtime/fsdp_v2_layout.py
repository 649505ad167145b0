# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which rows of a parameter each rank holds under version 2 of Megatron-FSDP.

A parameter group lays its tensors out in one buffer (``GlobalLayout``), and all ranks hold segments
of one size that are cut at whole rows. Rows of all ranks follow from integers, without
communication. Both generations are read: releases (``megatron_fsdp.experimental``) and Megatron-LM
main.
"""

import functools
import itertools
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Placement

_GROUP = "_mfsdp_parameter_group"


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
    # By identity: == of DTensors compares values.
    found = [i for i, each in enumerate(_parameters(group)) if each.sharded is param]
    if not found:
        raise ValueError(
            "expected a parameter of a model that exists, got one of none. Keep the model, and "
            "pass its parameters"
        )
    return group, found[0]


def unsharded_of(param: DTensor) -> torch.Tensor:
    """Return what modules see in place of a sharded parameter in a forward pass."""
    group, index = place_of(param)
    return _parameters(group)[index].unsharded


class _Parameter(NamedTuple):
    name: str
    sharded: DTensor
    unsharded: torch.Tensor


def _parameters(group: Any) -> list[_Parameter]:  # noqa: ANN401 - a class of megatron
    """Return the parameters of a group, of which None has none."""
    if hasattr(group, "fsdp_parameters"):
        return [_Parameter(p.fqns[0], p.sharded, p.unsharded) for p in group.fsdp_parameters]
    if group is None:
        return []
    names = (group.parameter_names, group.sharded_parameters, group.unsharded_parameters)
    return list(itertools.starmap(_Parameter, zip(*names, strict=True)))


def names_that_block_gradients(param: DTensor) -> tuple[object, list[str]]:
    """Return the module of a parameter, and what keeps Megatron-FSDP from reducing its gradients.

    It waits until all parameters of the module have a gradient. Those that lack one are named if
    others have theirs: nothing of the module is reduced then.
    """
    group = _group_of(param)
    if group is None:
        return None, []
    module = group._owning_module() if hasattr(group, "_owning_module") else group.owning_module
    waiting = [
        each for one in module._parameter_groups if one.requires_grad for each in _parameters(one)
    ]
    missing = [each.name for each in waiting if each.unsharded.grad is None]
    return module, missing if len(missing) < len(waiting) else []


def rows_by_rank(param: DTensor) -> dict[int, tuple[int, int]]:
    """Return rows ``(start, stop)`` of dimension 0 by rank of the job, for ranks of the mesh."""
    group, index = place_of(param)
    layout = group.main_weight.layout
    shape, begin = layout.tensor_shapes[index], layout.tensor_to_offset[index]
    row_size, end = math.prod(shape[1:]), begin + math.prod(shape)
    rows: dict[int, tuple[int, int]] = {}
    for rank, (start, stop) in _segments(param.device_mesh, param.placements, layout.size).items():
        low, high = max(start, begin), min(stop, end)
        held = ((low - begin) // row_size, (high - begin) // row_size) if low < high else (0, 0)
        rows[rank] = held
    return rows


# Groups of layers have one size: the ranks of a large mesh are visited once.
@functools.lru_cache(maxsize=64)
def _segments(
    mesh: DeviceMesh, placements: tuple[Placement, ...], size: int
) -> dict[int, tuple[int, int]]:
    """Return elements ``(start, stop)`` of a buffer by rank: the last axis of the mesh cuts first.

    Source: ``GlobalLayout.get_local_range`` of megatron-core.
    """
    segments: dict[int, tuple[int, int]] = {}
    ranks = mesh.mesh  # a property that makes a tensor
    for coordinate in itertools.product(*map(range, mesh.shape)):
        start, length = 0, size
        for axis in reversed(range(mesh.ndim)):
            if placements[axis].is_shard():
                length //= mesh.size(axis)
                start += coordinate[axis] * length
        segments[int(ranks[coordinate])] = (start, start + length)
    return segments
