# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks agree which parameters have gradients, and that these are finite."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.fsdp2.parameters import NamedParameter, named_parameters
from megatron_muon.fsdp2.plan_inputs import DTensorPlanInput
from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.finite import find_not_finite
from megatron_muon.runtime.fsdp_v2_layout import is_of_fsdp_v2, names_that_block_gradients

_ADVICE = "Nothing was updated."


def parameters_without_gradient(
    inputs: Sequence[DTensorPlanInput],
    group: dist.ProcessGroup | None,
    device: torch.device,
    known_problems: Sequence[str] = (),
) -> set[torch.Tensor]:
    """Return the parameters that nobody has a gradient of, once all others are found to be fine.

    Args:
        inputs: Of this rank.
        group: Ranks that step together; None for all of the job.
        device: Where flags are reduced.
        known_problems: Others of this rank, as sentences.

    Raises:
        RuntimeError: On all ranks of the group, when one has a known problem; naming rank and
            parameter, when a gradient is not finite, is of another dtype (but bfloat16), placement
            or shape than its parameter, or is missing on some ranks that hold the parameter and not
            on others.

    Communication: one all-reduce of two int32 over the group, read by the host once. Where a
        gradient is missing: one more of two int32 a parameter over each domain, and a flag.
    """
    parameters = [each for given in inputs for each in given.parameters]
    problems = [*known_problems, *blocked_problems(parameters)]
    grads: list[tuple[str, torch.Tensor]] = []
    for each in parameters:
        found = _problems(each)
        problems += found
        # One with a problem is left out: a sparse gradient has no norm of this kind.
        if each.param.grad is not None and not found and _num_local(each.param):
            grads.append((each.name, local_tensor(each.param.grad)))
    not_finite = find_not_finite(grads, device)
    num_missing = sum(_is_missing(each) for each in parameters)
    # One tensor for both: an all-reduce costs its latency, and the host waits once. Filled on the
    # device: for a copy of the numbers the host would wait, until all of the backward pass is done.
    flags = torch.full((2,), num_missing, dtype=torch.int32, device=device)
    flags[0].copy_(not_finite.number.add_(len(problems)))
    if dist.is_initialized():
        dist.all_reduce(flags, group=group)
    num_problems, num_missing = flags.tolist()
    # Only now, once somebody has something to say: the usual step pays for eight bytes.
    if num_problems:
        problems += not_finite.explain()
        raise_where_any_rank_fails(problems, group, device, _ADVICE)
    if not num_missing:
        return set()
    # All ranks come here together, since they have seen the same sum: those that lack nothing too.
    without: set[torch.Tensor] = set()
    for given in inputs:
        names = _missing_on_some(given, without, device)
        problems += [
            f"{name}: expected a gradient on all ranks that hold the parameter or on none, got it "
            "on some. Let all ranks use the parameter in the loss"
            for name in names
        ]
    raise_where_any_rank_fails(problems, group, device, _ADVICE)
    return without


def refuse_grad_scaler(optimizer: Any) -> None:  # noqa: ANN401 - with attributes of GradScaler's
    """Raise if a ``GradScaler`` calls the step: it would leave out that of one rank alone.

    It sets two attributes, even if it has unscaled gradients. All ranks have one or none.

    Raises:
        RuntimeError: With what to do.
    """
    if hasattr(optimizer, "found_inf"):
        del optimizer.found_inf, optimizer.grad_scale
        raise RuntimeError(
            "step: expected gradients that are not scaled, got a GradScaler. Compute in bfloat16, "
            "which needs none."
        )


def _missing_on_some(
    given: DTensorPlanInput, without: set[torch.Tensor], device: torch.device
) -> list[str]:
    """Return names of parameters with a gradient on some ranks; add to ``without`` those on none.

    Ranks that hold nothing of a parameter have no say.
    """
    # Counted over the domain, not the mesh: ranks of other domains hold other matrices of a batch,
    # which may be without gradients of their own.
    holds = [bool(_num_local(each.param)) for each in given.parameters]
    missing = [_is_missing(each) for each in given.parameters]
    counts = torch.tensor([missing, holds], dtype=torch.int32, device=device)
    if given.plan_input.domain.group is not None:
        dist.all_reduce(counts, group=given.plan_input.domain.group)
    names = []
    for each, num_missing, num_holding in zip(given.parameters, *counts.tolist(), strict=True):
        if num_missing == num_holding:
            without.add(each.param)
        elif num_missing:
            names.append(each.name)
    return names


def _is_missing(parameter: NamedParameter) -> bool:
    return parameter.param.grad is None and _num_local(parameter.param) > 0


def _num_local(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).numel()


def _problems(parameter: NamedParameter) -> list[str]:
    """Return what is wrong with a gradient, a sentence or none."""
    param, grad = parameter.param, parameter.param.grad
    if grad is None or _is_alike(param, grad):
        return []
    return [
        f"{parameter.name}: expected a gradient like the parameter, {_description(param)}, got "
        f"{_description(grad)}. Reduce a partial one: grad.redistribute(placements="
        "param.placements)"
    ]


def blocked_problems(parameters: Iterable[NamedParameter]) -> list[str]:
    """Return why version 2 of Megatron-FSDP has set no gradients, a sentence a module."""
    problems: dict[int, str] = {}
    for each in parameters:
        if each.param.grad is None and is_of_fsdp_v2(each.param):
            module, names = names_that_block_gradients(each.param)  # type: ignore[arg-type]
            if names:
                problems[id(module)] = (
                    f"{each.name}: expected gradients of all parameters of its module, got none of "
                    f"{names}, for which Megatron-FSDP reduces none. Use them in the loss, or set "
                    "requires_grad to False before fully_shard()"
                )
    return list(problems.values())


def elementwise_problems(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why AdamW or Lion cannot step parameters, as sentences."""
    params = [param for group in groups for param in group["params"]]
    if all(param.grad is not None and param.grad.dtype == param.dtype for param in params):
        return []
    parameters = list(named_parameters(groups))
    return blocked_problems(parameters) + [
        f"{each.name}: expected a gradient of {each.param.dtype} for AdamW or Lion, got "
        f"{each.param.grad.dtype}. Reduce gradients in that dtype; leave precision_aware out of "
        "fully_shard_optimizer()"
        for each in parameters
        if each.param.grad is not None and each.param.grad.dtype != each.param.dtype
    ]


def _is_alike(param: torch.Tensor, grad: torch.Tensor) -> bool:
    own, other = local_tensor(param), local_tensor(grad)
    # Attributes, not texts: it runs for each parameter in each step.
    return (
        # FSDP2 may leave them in another dtype (reduce_dtype, from torch 2.15 on grad_dtype).
        other.dtype in (torch.float32, torch.bfloat16)
        and (own.shape, own.device, own.layout) == (other.shape, other.device, other.layout)
        and isinstance(grad, DTensor) == isinstance(param, DTensor)
        and getattr(grad, "placements", None) == getattr(param, "placements", None)
    )


def _description(tensor: torch.Tensor) -> str:
    local = local_tensor(tensor)
    text = f"{local.dtype} {tuple(local.shape)} {local.layout} on {local.device.type}"
    return text + (f" {tensor.placements}" if isinstance(tensor, DTensor) else "")
