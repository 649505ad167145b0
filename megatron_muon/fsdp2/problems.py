# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Errors of arguments and parameters of Muon, found at construction on all ranks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from emerging_optimizers.utils import FP32MatmulPrecT
from torch.distributed.tensor import DTensor

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.matrices import output_slices
from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v2
from megatron_muon.rows.parameters import (
    PlannedParameter,
    checkpointed_box,
    is_strided,
    sharded_dim,
)
from megatron_muon.runtime.agreement import own_rank
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import SCALE_MODES, WEIGHT_DECAY_METHODS, scale_function
from megatron_muon.step.matrix_step import StepSettings
from megatron_muon.step.muon_step import MuonSettings
from megatron_muon.step.second_moments import SecondMoments, method_problems

# Of emerging-optimizers: they see whole matrices there, and would see shards here.
_HOOKS = (
    "orthogonalize",
    "pre_weight_update_fn_inplace",
    "post_weight_update_fn_inplace",
    "_apply_weight_decay_inplace",
)


def muon_settings(
    options: Mapping[str, Any],
) -> tuple[MuonSettings, SecondMoments, list[str]]:
    """Build the settings of Muon.

    Args:
        options: Keyword arguments of :class:`~megatron_muon.fsdp2.Muon` by name.

    Returns:
        The settings, the second moments, and errors of arguments, as sentences.
    """
    scale = scale_function(options["scale_mode"], options["extra_scale_factor"])
    moments = SecondMoments(options["adaptive"], options["beta2"], options["eps"], scale)
    precision, function = options["fp32_matmul_prec"], options["newton_schulz"]
    settings = MuonSettings(
        NewtonSchulzSettings(
            options["num_ns_steps"],
            options["coefficient_type"],
            # Then rows may be sent in bf16.
            precision == "medium" and function is None,
            # Results that are divided element by element are scaled afterwards.
            scale_function("none", 1.0) if moments.is_elementwise else scale,
            function,
            moments.method,
        ),
        options["exchange"] or ExchangeSettings(),
        StepSettings(
            options["nesterov"],
            options["weight_decay_method"],
            precision,
            momentum_dtype=options["momentum_dtype"],
            offload_momentum=options["offload_momentum"],
        ),
        f"{options['scale_mode']} {options['extra_scale_factor']}",
    )
    return settings, moments, _settings_problems(settings, options)


def _settings_problems(settings: MuonSettings, options: Mapping[str, Any]) -> list[str]:
    """List arguments that cannot work, one sentence per argument.

    Emerging-optimizers finds unknown names in a step, when weights are decayed and other ranks
    wait.
    """
    newton_schulz, exchange = settings.newton_schulz, settings.exchange
    function = newton_schulz.function
    problems = [
        f"{name}: expected one of {choices}, got {options[name]!r}. Choose one"
        for name, choices in (
            ("weight_decay_method", sorted(WEIGHT_DECAY_METHODS)),
            ("fp32_matmul_prec", sorted(get_args(FP32MatmulPrecT))),
            ("scale_mode", sorted(SCALE_MODES)),
            ("momentum_dtype", [torch.float32, torch.bfloat16]),
        )
        if options[name] not in choices
    ]
    if newton_schulz.steps < 1:
        problems.append(f"num_ns_steps: expected at least 1, got {newton_schulz.steps}. Pass more")
    if options["use_syrk"]:
        problems.append(
            "use_syrk: expected False, got True. Pass "
            'exchange=ExchangeSettings(newton_schulz="symmetric") for such kernels'
        )
    if function is not None and (not callable(function) or exchange.newton_schulz != "standard"):
        problems.append(
            f"newton_schulz: expected a function of a stack, got {function!r} and "
            f"exchange.newton_schulz {exchange.newton_schulz}. Pass a function, or a name there"
        )
    problems += method_problems(options["adaptive"], options["weight_decay_method"])
    for check in (
        lambda: exchange.comm_dtypes(newton_schulz.is_bf16),
        lambda: newton_schulz.coefficients,
    ):
        try:
            check()
        except ValueError as error:
            problems.append(str(error).removesuffix("."))
    return problems


def subclass_problems(optimizer: WholeMatrixMuon) -> list[str]:
    """List methods of a subclass that would see shards."""
    return [
        f"{type(optimizer).__name__}.{name}: expected emerging-optimizers' own, got another, which "
        "would see a shard. Change what is orthogonalized by split_sizes"
        for name in _HOOKS
        if getattr(type(optimizer), name) is not getattr(WholeMatrixMuon, name)
    ]


def repeated_problems(parameters: Sequence[PlannedParameter]) -> list[str]:
    """List parameters and names that occur twice: errors identify parameters by name."""
    params, names = Counter(p.param for p in parameters), Counter(p.name for p in parameters)
    repeated = [p.name for p in parameters if params[p.param] > 1 or names[p.name] > 1]
    return [
        f"{name}: expected each parameter and each name once, got one twice. Leave it out, or "
        "rename it"
        for name in dict.fromkeys(repeated)
    ]


def parameter_problem(parameter: PlannedParameter, device: torch.device) -> str | None:
    """Describe the problem of a parameter, a sentence that starts with its name, or return None.

    Args:
        parameter: The user's parameter.
        device: Device of shards.
    """
    for key, value in (("transposed", parameter.is_transposed), ("flatten", parameter.flattens)):
        if type(value) is not bool:
            return f"{parameter.name}: {key}: expected True or False, got {value!r}. Set it so"
    try:
        problem = _tensor_problem(parameter, device) or _layout_problem(parameter)
        if problem is None:
            output_slices(
                parameter.view.shape[-2:][int(parameter.is_transposed)],
                parameter.split_sizes,
                is_transposed=parameter.is_transposed,
            )
    except ValueError as error:
        problem = str(error)
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
    if parameter.known_boxes is not None:
        if shape == sizes:
            return None
        return (
            f"expected ranges {box}, as its buffer or partition_dim says, got shape {shape}. "
            "Report it"
        )
    plain = [sharded_dim(placement) for placement in placements if not is_strided(placement)]
    if hasattr(mesh, "_shard_order") and any(plain.count(dim) > 1 for dim in range(param.ndim)):
        return (
            "expected a parameter of the model on a mesh of Megatron-FSDP, got a copy, which does "
            f"not say in which order the axes of {placements} have cut it. Pass the parameter"
        )
    # Twice: by the shard itself, and by torch's checkpoints, which know the split factors of
    # strided shards.
    if shape != sizes or checkpointed_box(param) != box:
        return (
            f"expected a shard of ranges {box}, as fully_shard cuts {tuple(param.shape)}, got "
            f"shape {shape} at {checkpointed_box(param)}. Report it, with {placements}"
        )
    return None
