# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check of the gradients of a step on all ranks, before anything is updated.

The norm is not finite if a gradient is not. So the norm that clipping needs also finds NaN and Inf,
without a second pass over the gradients. Norm and clipping are upstream's. With Transformer Engine
the norm stays on the device, and clipping is launched before the host reads the count of problems.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.tensors import find_not_finite


def raise_where_gradients_fail(
    fqns: Mapping[Any, str], problems: Sequence[str], device: torch.device
) -> None:
    """Check on all ranks together that all gradients exist and are finite.

    Args:
        fqns: Names of the DTensor parameters.
        problems: Those of this rank that are known, missing gradients among them, as sentences.
        device: Device of the reduction of a flag.

    Raises:
        RuntimeError: On all ranks, naming rank and parameter, if a non-empty shard on any of them
            has no gradient, or one that is not finite.

    Communication: one all-reduce of a single int32 over all ranks of the job, read on the host.
    """
    grads = [
        (fqn, param.grad._local_tensor)
        for param, fqn in fqns.items()
        if param.grad is not None and param.grad._local_tensor.numel() > 0
    ]
    not_finite = find_not_finite(grads, device)
    raise_where_any_rank_fails(
        list(problems),
        None,
        device,
        "Every trainable parameter needs a finite, reduced gradient before step(): call "
        "finish_grad_sync() after the backward pass, and look for NaN or Inf in the loss. Nothing "
        "was updated.",
        suspects=not_finite.number,
        explain=not_finite.explain,
    )


def count_problems(
    norm: float | torch.Tensor,
    others: Sequence[torch.Tensor],
    num_problems: int,
    device: torch.device,
) -> torch.Tensor:
    """Sum the problems of all ranks, without a read by the host.

    Args:
        norm: Norm of the gradients; one that is not finite is a problem.
        others: Non-empty gradients that the norm leaves out, see :func:`gradients_beside_norm`.
        num_problems: Number of known problems of this rank.
        device: Device of the result.

    Returns:
        float32 of one element on the device, NaN where a norm is not finite on any rank.

    Communication: one all-reduce of a single float32 over all ranks of the job.
    """
    norms = [torch.as_tensor(norm, device=device)]
    norms += torch._foreach_norm(list(others)) if others else []
    # Zero times Inf or NaN is NaN, and so is every sum with it.
    values = torch.cat([each.reshape(1) for each in norms]).mul_(0.0)
    total = values.sum(dtype=torch.float32).reshape(1).add_(num_problems)
    dist.all_reduce(total)
    return total


def missing_gradients(fqns: Mapping[Any, str]) -> list[str]:
    """Name the parameters that have rows on this rank and no gradient, as sentences."""
    return [
        f"{fqn}: expected a gradient on a shard of shape {tuple(param._local_tensor.shape)}, got "
        "None"
        for param, fqn in fqns.items()
        if param.grad is None and param._local_tensor.numel() > 0
    ]


def gradients_beside_norm(children: Sequence[MegatronOptimizer]) -> list[torch.Tensor]:
    """List the local gradients that the norm leaves out, such as tensor-parallel duplicates.

    Args:
        children: The optimizers of a model.
    """
    grads = [
        param.grad._local_tensor
        for child in children
        for param in child.get_parameters()
        if param.grad is not None
    ]
    counted = {id(grad) for child in children for grad in child.get_grads_for_grad_norm()}
    return [grad for grad in grads if grad.numel() > 0 and id(grad) not in counted]
