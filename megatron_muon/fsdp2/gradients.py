# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks before a step: gradients are finite, and present on all ranks or on none."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.fsdp2.parameters import ranks_with
from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v2, names_that_block_gradients
from megatron_muon.rows.parameters import PlannedParameter, ranks_of_mesh
from megatron_muon.runtime.agreement import (
    gather_objects,
    own_rank,
    raise_where_any_rank_fails,
)
from megatron_muon.runtime.tensors import find_not_finite, local_tensor
from megatron_muon.step.plan_inputs import PlanInputs

_ADVICE = "Nothing was updated."


class GradientKey(NamedTuple):
    """Identifies a parameter on the ranks that hold it.

    Args:
        name: Its name. Pipeline stages may share names.
        ranks: Its holders. Ranks of other domains hold other matrices of a batch, maybe without
            gradients.
        is_muons: Whether Muon steps it. Parameters without names are numbered by optimizer.
    """

    name: str
    ranks: tuple[int, ...]
    is_muons: bool


def by_holders(
    plan_inputs: PlanInputs,
    others: Sequence[PlannedParameter],
    copies: dist.ProcessGroup | None,
) -> dict[GradientKey, PlannedParameter]:
    """Return this rank's parameters.

    Args:
        plan_inputs: Plans of Muon's parameters.
        others: Parameters that AdamW or Lion steps.
        copies: Ranks with copies of plain tensors; None for this one alone.
    """
    holders = {
        GradientKey(parameter.name, plan.domain.ranks, True): parameter
        for plan, parameters in zip(plan_inputs.inputs, plan_inputs.parameters, strict=True)
        for parameter in parameters
    }
    for parameter in others:
        mesh = getattr(parameter.param, "device_mesh", None)
        ranks = ranks_with(copies) if mesh is None else ranks_of_mesh(mesh)
        holders[GradientKey(parameter.name, ranks, False)] = parameter
    return holders


def agree_to_step(
    holders: Mapping[GradientKey, PlannedParameter],
    group: dist.ProcessGroup | None,
    device: torch.device,
    known_problems: Sequence[str] = (),
    fresh_params: Collection[torch.Tensor] = (),
) -> set[torch.Tensor]:
    """Agree on all ranks to step, and return the parameters without a gradient on any rank.

    Args:
        holders: Parameters of this rank, of ``by_holders()``.
        group: Ranks that step together; None for all of the job.
        device: Where flags are reduced.
        known_problems: Other problems of this rank, as sentences.
        fresh_params: Parameters whose state is fresh in this step on this rank.

    Raises:
        RuntimeError: On all ranks of the group, when one has a known problem; naming rank and
            parameter, when a gradient is not finite, has another dtype (but bfloat16), placement
            or shape than its parameter, or is missing, or its state is fresh, on some holders of
            the parameter alone.

    Communication: one all-reduce of two int32 over the group, read by the host once. Where a
        gradient is missing, or state is fresh: a gather of names over the group, and a flag.
    """
    problems = [*known_problems, *_blocked_problems(holders.values())]
    grads: list[tuple[str, torch.Tensor]] = []
    missing: list[GradientKey] = []
    fresh = [key for key, each in holders.items() if each.param in fresh_params]
    # Few calls: it runs per parameter and step, whatever the device.
    for key, parameter in holders.items():
        grad, shard = parameter.param.grad, local_tensor(parameter.param)
        if grad is None:
            if shard.numel():
                missing.append(key)
            continue
        problem = _problem(parameter.param, grad, is_muons=key.is_muons)
        # One with a problem is left out: a sparse gradient has no norm of this kind.
        if problem:
            problems.append(f"{parameter.name}: {problem}")
        elif shard.numel():
            grads.append((parameter.name, local_tensor(grad)))
    not_finite = find_not_finite(grads, device)
    # One tensor for both: an all-reduce costs its latency, and the host waits once. Filled on the
    # device: for a copy of the numbers the host would wait, until all of the backward pass is done.
    flags = torch.full((2,), len(missing) + len(fresh), dtype=torch.int32, device=device)
    flags[0].copy_(not_finite.number.add_(len(problems)))
    if dist.is_initialized():
        dist.all_reduce(flags, group=group)
    num_problems, num_unusual = flags.tolist()
    # Only now, once a rank has a problem: the usual step pays for eight bytes.
    if num_problems:
        problems += not_finite.explain()
        raise_where_any_rank_fails(problems, group, device, _ADVICE)
    # All ranks come here together, also without missing gradients: they have seen the same sum.
    if num_unusual:
        problems = _one_sided_problems(holders, missing, fresh, group)
        raise_where_any_rank_fails(problems, group, device, _ADVICE)
    return {holders[key].param for key in missing}


def _one_sided_problems(
    holders: Mapping[GradientKey, PlannedParameter],
    missing: Sequence[GradientKey],
    fresh: Sequence[GradientKey],
    group: dist.ProcessGroup | None,
) -> list[str]:
    """List gradients and states that other holders of a parameter lack, and this rank has."""
    problems = []
    for rank, without, others in gather_objects((own_rank(), missing, fresh), group):
        problems += [
            f"{key.name}: expected a gradient on all ranks that hold the parameter or on none, got "
            f"none on rank {rank}. Let all ranks use the parameter in the loss"
            for key in holders.keys() & set(without)
            if holders[key].param.grad is not None and local_tensor(holders[key].param).numel()
        ]
        problems += [
            f"{key.name}: expected to reset state on all ranks that hold the parameter or on none, "
            f"got no state on rank {rank}. Reset it on all ranks, or load a state"
            for key in holders.keys() & set(others) - set(fresh)
            # Empty shards of AdamW may have no state.
            if key.is_muons or holders[key].param.grad is not None
        ]
    return problems


def refuse_grad_scaler(optimizer: Any) -> None:  # noqa: ANN401 - with attributes of GradScaler's
    """Raise if a ``GradScaler`` calls the step: it could skip the step of one rank alone.

    It sets two attributes, even if it has unscaled gradients. All ranks have one or none.

    Raises:
        RuntimeError: With advice.
    """
    if hasattr(optimizer, "found_inf"):
        del optimizer.found_inf, optimizer.grad_scale
        raise RuntimeError(
            "step: expected gradients that are not scaled, got a GradScaler. Compute in bfloat16, "
            "which needs none."
        )


def _problem(param: torch.Tensor, grad: torch.Tensor, *, is_muons: bool) -> str | None:
    """Return the problem of a gradient, or None."""
    shard, other = local_tensor(param), local_tensor(grad)
    # FSDP2 may leave them in another dtype (reduce_dtype, from torch 2.15 on grad_dtype).
    dtypes = (torch.float32, torch.bfloat16) if is_muons else (shard.dtype,)
    # FSDP2 makes empty shards of several shapes.
    has_shape = shard.shape == other.shape or shard.numel() == other.numel() == 0
    if shard.layout != other.layout:
        advice = "Leave sparse=True out of nn.Embedding; SparseAdam alone steps such gradients"
    elif other.dtype not in dtypes:
        advice = "Reduce it in such a dtype; leave precision_aware out of fully_shard_optimizer()"
    # torch's AdamW reduces a partial gradient of a DTensor. A plain tensor has no placements.
    elif is_muons and getattr(param, "placements", None) != getattr(grad, "placements", None):
        advice = "Reduce a partial one: grad.redistribute(placements=param.placements)"
    elif is_muons and not (has_shape and shard.device == other.device):
        advice = "Leave it as the backward pass of the sharded model writes it"
    else:
        return None
    return (
        f"expected a gradient like the parameter, {_description(param)}, got {_description(grad)}. "
        + advice
    )


def _blocked_problems(parameters: Iterable[PlannedParameter]) -> list[str]:
    """Describe missing gradients of version 2 of Megatron-FSDP, a sentence a module."""
    problems: dict[int, str] = {}
    for parameter in parameters:
        if parameter.param.grad is None and is_of_fsdp_v2(parameter.param):
            module, names = names_that_block_gradients(parameter.param)  # type: ignore[arg-type]
            if names:
                problems[id(module)] = (
                    f"{parameter.name}: expected gradients of all parameters of its module, got "
                    f"none of {names}, for which Megatron-FSDP reduces none. Use them in "
                    "the loss, or set requires_grad to False before fully_shard()"
                )
    return list(problems.values())


def _description(tensor: torch.Tensor) -> str:
    local = local_tensor(tensor)
    text = f"{local.dtype} {tuple(local.shape)} {local.layout} on {local.device.type}"
    return text + (f" {tensor.placements}" if isinstance(tensor, DTensor) else "")
