# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Offsets of shards in the tensors of a checkpoint, which ranks gather for all tensors together.

Upstream gathers shapes for each tensor and each axis of its mesh, and twice more for each half of a
gated layer. These collectives are most of the time that a save blocks training.
"""

import itertools
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    filter_unflattened_state_dict,
    get_unflattened_state_dict,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from megatron_muon.mcore.patching import Patch, replaced

_GATHER = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor:"
    "gather_and_compute_chunk_metadata"
)


def place_together(original: Any, state_dict: dict[str, Any]) -> Any:
    """Wrap ``preprocess_state_dict_for_uneven_dtensor``.

    Communication: an all-gather of objects over each process group that shards tensors, for the
        innermost axes of all tensors, then for the next ones; in the order of names.
    """
    keys = filter_unflattened_state_dict(
        state_dict, visit_condition=lambda value: isinstance(value, DTensor)
    )
    # In the order in which the original asks for them.
    tensors = [get_unflattened_state_dict(state_dict, key) for key in sorted(keys)]
    offsets = [[0] * tensor.dim() for tensor in tensors]
    # Of the shards of ever more ranks together.
    sizes = [[*tensor._local_tensor.shape] for tensor in tensors]
    for axes in itertools.zip_longest(*map(_sharded_axes, tensors)):
        members = defaultdict(list)
        for i, axis in enumerate(axes):
            if axis is not None:
                members[tensors[i].device_mesh.get_group(axis)].append(i)
        for group, own in members.items():
            of_ranks: list[Any] = [None] * group.size()
            dist.all_gather_object(of_ranks, [sizes[i] for i in own], group=group)
            for i, shapes in zip(own, zip(*of_ranks, strict=True), strict=True):
                dim = tensors[i].placements[axes[i]].dim
                offsets[i][dim] += sum(shape[dim] for shape in shapes[: group.rank()])
                sizes[i][dim] = sum(shape[dim] for shape in shapes)
    known = iter(offsets)
    patch = Patch(
        _GATHER,
        "answer from what was gathered",
        lambda _, tensor: ChunkStorageMetadata(torch.Size(next(known)), tensor._local_tensor.shape),
        applies_to="call",
    )
    with replaced(patch):
        return original(state_dict)


def _sharded_axes(tensor: DTensor) -> list[int]:
    """Return the axes of the mesh that shard a tensor, as upstream from the innermost one on."""
    placements = tensor.placements
    order = getattr(tensor.device_mesh, "_shard_order", None)
    axes = (
        reversed(order)
        if order is not None
        # A strided axis is inside of the others.
        else sorted(
            range(len(placements)), key=lambda i: not isinstance(placements[i], _StridedShard)
        )
    )
    return [axis for axis in axes if isinstance(placements[axis], (Shard, _StridedShard))]
