# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which rows of a parameter each rank holds under version 2 of Megatron-FSDP.

A parameter group lays its tensors out in one buffer (``GlobalLayout``), and all ranks hold segments
of one size that are cut at whole rows. Rows of all ranks follow from integers, without
communication. Both generations are read: releases (``megatron_fsdp.experimental``) and Megatron-LM
main.
"""

import itertools
import math
import weakref
from typing import Any

from torch.distributed.tensor import DTensor

_GROUP = "_mfsdp_parameter_group"


def is_of_fsdp_v2(param: object) -> bool:
    """Return whether version 2 of Megatron-FSDP has sharded a parameter."""
    return hasattr(param, _GROUP)


def place_of(param: DTensor) -> tuple[Any, int]:
    """Return the group of a sharded parameter, and the index of the parameter in it."""
    group = getattr(param, _GROUP)
    # Main's is a weak reference, so that parameters do not keep modules alive.
    group = group() if isinstance(group, weakref.ref) else group
    if hasattr(group, "fsdp_parameters"):
        shards = [each.sharded for each in group.fsdp_parameters]
    else:
        shards = group.sharded_parameters
    # By identity: == of DTensors compares values.
    return group, next(i for i, each in enumerate(shards) if each is param)


def rows_by_rank(param: DTensor) -> dict[int, tuple[int, int]]:
    """Return rows ``(start, stop)`` of dimension 0 by rank of the job, for all ranks of the mesh.

    Source: ``GlobalLayout.get_local_range`` of megatron-core. The last axis of the mesh cuts first.
    """
    group, index = place_of(param)
    layout = group.main_weight.layout
    shape, begin = layout.tensor_shapes[index], layout.tensor_to_offset[index]
    row_size = math.prod(shape[1:])
    mesh = param.device_mesh
    ranks = mesh.mesh  # a property that makes a tensor
    rows: dict[int, tuple[int, int]] = {}
    for coordinate in itertools.product(*map(range, mesh.shape)):
        start, size = 0, layout.size
        for axis in reversed(range(mesh.ndim)):
            if param.placements[axis].is_shard():
                size //= mesh.size(axis)
                start += coordinate[axis] * size
        low, high = max(start, begin), min(start + size, begin + math.prod(shape))
        held = ((low - begin) // row_size, (high - begin) // row_size) if low < high else (0, 0)
        rows[int(ranks[coordinate])] = held
    return rows
