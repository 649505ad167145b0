# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Validation of the parameters of Muon at construction, on all ranks."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v2
from megatron_muon.rows.parameters import (
    PlannedParameter,
    checkpointed_box,
    is_strided,
    sharded_dim,
)
from megatron_muon.runtime.agreement import own_rank
from megatron_muon.runtime.tensors import local_tensor

# Methods that emerging-optimizers calls with whole matrices; here they would see shards.
_HOOKS = (
    "orthogonalize",
    "pre_weight_update_fn_inplace",
    "post_weight_update_fn_inplace",
    "_apply_weight_decay_inplace",
)


def parameter_problems(
    optimizer_class: type, parameters: Sequence[PlannedParameter], device: torch.device
) -> list[str]:
    """List errors of a subclass of Muon and of its parameters, one sentence each.

    Args:
        optimizer_class: Class of the optimizer.
        parameters: Its parameters, with their views.
        device: Device of shards.
    """
    problems = [
        f"{optimizer_class.__name__}.{name}: expected no method of emerging-optimizers, got one, "
        "which would see a shard. Change what is orthogonalized by split_sizes"
        for name in _HOOKS
        if hasattr(optimizer_class, name)
    ]
    # Errors identify parameters by name.
    counts = Counter(key for p in parameters for key in (id(p.param), p.name))
    repeated = [p.name for p in parameters if counts[id(p.param)] > 1 or counts[p.name] > 1]
    problems += [
        f"{name}: expected each parameter and each name once, got one twice. Leave it out, or "
        "rename it"
        for name in dict.fromkeys(repeated)
    ]
    problems += filter(None, (_parameter_problem(p, device) for p in parameters))
    return problems


def _parameter_problem(parameter: PlannedParameter, device: torch.device) -> str | None:
    """Describe the problem of a parameter, a sentence that starts with its name, or return None."""
    for key, value in (("transposed", parameter.is_transposed), ("flatten", parameter.flattens)):
        if type(value) is not bool:
            return f"{parameter.name}: {key}: expected True or False, got {value!r}. Set it so"
    problem = _tensor_problem(parameter, device) or _layout_problem(parameter)
    return None if problem is None else f"{parameter.name}: {problem}"


def _tensor_problem(parameter: PlannedParameter, device: torch.device) -> str | None:
    """Describe the problem of the tensor itself, or return None."""
    param, local = parameter.param, local_tensor(parameter.param)
    if parameter.view.ndim not in (2, 3):
        return (
            f"expected a matrix, or a batch of matrices, got shape {tuple(param.shape)}. Step it "
            "with AdamW; set flatten=True in the group of a convolution"
        )
    if parameter.view.numel() == 0:
        return f"expected elements, got shape {tuple(param.shape)}. Leave it out"
    # It would step a gathered copy that FSDP2 frees, and the model would learn nothing.
    is_plain = not isinstance(parameter.view, DTensor)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if is_plain and (num_ranks > 1 or is_of_fsdp_v2(param)):
        return (
            f"expected a DTensor in a job of {num_ranks} ranks, got a plain tensor. "
            "Call fully_shard first; build the optimizer before the first forward pass or after a "
            "backward pass, as modules hold gathered copies in between; under DDP pass "
            "process_group, the ranks with copies of the model"
        )
    try:
        local.untyped_storage().data_ptr()
    # Torch raises either for a tensor subclass without storage, such as quantized weights.
    except (NotImplementedError, RuntimeError):
        return (
            "expected a tensor with memory of its own, or one that wraps a tensor of its shape and "
            f"dtype, got {type(local).__name__}. Step it with AdamW"
        )
    if param.dtype not in (torch.float32, torch.bfloat16):
        return (
            f"expected float32 or bfloat16, got {param.dtype}. Keep parameters in float32 and "
            "compute in less: fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype="
            "torch.bfloat16))"
        )
    if local.device != device:
        return (
            f"expected shards on {device}, as the mesh or the first parameter is, got "
            f"{local.device}. Shard all parameters with CPUOffloadPolicy, or none"
        )
    return None


def _layout_problem(parameter: PlannedParameter) -> str | None:
    """Describe the problem of mesh and placements, or return None."""
    param = parameter.view
    if not isinstance(param, DTensor):
        return None
    mesh, placements = param.device_mesh, param.placements
    if any(placement.is_partial() for placement in placements):
        return f"expected a reduced tensor, got placements {placements}. Reduce it first"
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return f"expected a mesh with rank {own_rank()}, got {mesh}. Leave it out here"
    # torch shards by the rank in the process group, in ascending order; the DTensor means the rank
    # in the mesh. Where they differ, a shard has other rows than the DTensor says.
    for axis, in_mesh in enumerate(coordinate):
        # get_local_rank() is the rank in the process group, despite its name.
        in_group = dist.get_rank(mesh.get_group(axis))
        if sharded_dim(placements[axis]) is not None and in_mesh != in_group:
            return (
                "expected a mesh whose ranks ascend along each axis that shards, got "
                f"{mesh}. Build the mesh so"
            )
    box, sizes = parameter.own_box, parameter.local_shape
    shape = tuple(param._local_tensor.shape)
    # Other sizes of an empty shard vary: FSDP2 sometimes makes them 0, too.
    if 0 in sizes and 0 in shape:
        return None
    is_known = parameter.known_boxes is not None
    dims = [sharded_dim(placement) for placement in placements if not is_strided(placement)]
    is_cut_twice = any(dims.count(dim) > 1 for dim in range(param.ndim))
    if not is_known and is_cut_twice and hasattr(mesh, "_shard_order"):
        return (
            "expected a parameter of the model on a mesh of Megatron-FSDP, got a copy, which does "
            f"not say in which order the axes of {placements} have cut it. Pass the parameter"
        )
    # Both the shard itself and torch's checkpoints, which know the split factors of strided shards,
    # must agree with the plan.
    saved_box = box if is_known else checkpointed_box(param)
    if (shape, saved_box) != (sizes, box):
        return (
            f"expected a shard of ranges {box} of {tuple(param.shape)}, got shape {shape} at "
            f"{saved_box}. Report it, with {placements}"
        )
    return None
