# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradient norm, clipping and the check of gradients, with one read by the host.

The norm is not finite if a gradient is not. So the norm that clipping needs also finds NaN and Inf,
without a second pass over the gradients.

With Transformer Engine the norm stays on the device: clipping is launched before the host reads the
count of problems. Otherwise upstream reads every norm by itself, and scales tensor by tensor; here
the host reads norms and count together, one fused call computes the norms, and another one clips.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

# Added to the norm before the division. Source: megatron-core 0.19.2, clip_grad_by_total_norm_fp32.
_CLIP_EPSILON = 1.0e-6


class GradientNorm(NamedTuple):
    """The norm of all gradients, and the number of problems on all ranks.

    Args:
        norm: As upstream returns it: a float, or with Transformer Engine a tensor on the device.
        num_problems: A number, or float32 of one element on the device, to be read by ``float()``
            once clipping has been launched. NaN where a norm is not finite.
    """

    norm: float | torch.Tensor
    num_problems: float | torch.Tensor


def norm_stays_on_device() -> bool:
    """Return whether Transformer Engine's kernels clip, without a read by the host."""
    return clip_grads.multi_tensor_scale_tensor_impl is not None


def count_problems(
    norms: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    num_problems: int,
    device: torch.device,
) -> torch.Tensor:
    """Sum the problems of all ranks, without a read by the host.

    Args:
        norms: Norms or their squares, of one element; one that is not finite is a problem.
        others: Gradients that these leave out, such as those of tensor-parallel duplicates.
        num_problems: Number of known problems of this rank.
        device: Device of the result.

    Returns:
        float32 of one element on the device, NaN where a norm is not finite on any rank.

    Communication: one all-reduce of a single float32 over all ranks of the job.
    """
    found = [norm.reshape(1) for norm in [*norms, *_norms(others)]]
    # Zero times what is not finite is NaN, and so is every sum with it.
    total = torch.cat(found).mul_(0.0).sum(dtype=torch.float32).reshape(1).add_(num_problems)
    dist.all_reduce(total)
    return total


def norm_on_host(
    gradients: Sequence[tuple[dist.ProcessGroup, Sequence[torch.Tensor]]],
    others: Sequence[torch.Tensor],
    num_problems: int,
    device: torch.device,
) -> GradientNorm:
    """Compute the norm of all gradients, with upstream's arithmetic without Transformer Engine.

    Args:
        gradients: Local gradients of the norm, with the group over which their squares are summed.
        others: Gradients that the norm leaves out, such as those of tensor-parallel duplicates.
        num_problems: Number of known problems of this rank.
        device: Device of the reductions.

    Communication: one all-reduce of a float32 per group, and another one over all ranks of the job.
    """
    squares = []
    for _, grads in gradients:
        norms = _norms(grads)
        squares.append(
            (torch.linalg.vector_norm(torch.stack(norms)) ** 2).reshape(1)
            if norms
            else torch.zeros(1, device=device)
        )
    # Before squares of other ranks are added, so that a problem is counted on its own rank.
    all_problems = count_problems(squares, others, num_problems, device)
    for (group, _), square in zip(gradients, squares, strict=True):
        dist.all_reduce(square, group=group)
    # One read by the host.
    *found, problems = torch.cat([*squares, all_problems]).tolist()
    norms_of_groups = [square**0.5 for square in found]
    norm = norms_of_groups[0]
    if len(norms_of_groups) > 1:
        norm = math.sqrt(sum(of_group**2 for of_group in norms_of_groups))
    return GradientNorm(norm, problems)


def clip(gradients: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients in place, so that their norm is at most ``max_norm``."""
    coefficient = max_norm / (norm + _CLIP_EPSILON)
    if coefficient < 1.0 and gradients:
        torch._foreach_mul_(list(gradients), coefficient)


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    held = [tensor for tensor in tensors if tensor.numel() > 0]
    return list(torch._foreach_norm(held)) if held else []
