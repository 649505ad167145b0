# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradient norm, clipping and the check of gradients, with one read by the host.

A norm is not finite where a gradient is not. So the norm that clipping needs finds NaN and Inf too:
no second pass over the gradients.

With Transformer Engine the norm stays on the device: clipping is launched before the host reads the
flag. Otherwise upstream reads each norm as it comes, and scales tensor by tensor; here the host
reads norms and flag together, and one fused call takes the norms, another one clips.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

# Added to the norm before the division. Source: megatron-core 0.19.2, clip_grad_by_total_norm_fp32.
_CLIP_EPSILON = 1.0e-6


class GradientNorm(NamedTuple):
    """The norm of all gradients, and whether a rank found something wrong.

    Args:
        norm: As upstream returns it: a float, or with Transformer Engine a tensor on the device.
        flag: Number of problems of all ranks, an int32 scalar on the device; None where the host
            has read it.
        num_problems: The same on the host; None where it has not been read.
    """

    norm: float | torch.Tensor
    flag: torch.Tensor | None
    num_problems: int | None

    def problems_on_host(self) -> int:
        """Read the flag, once clipping has been launched."""
        if self.flag is None:
            assert self.num_problems is not None
            return self.num_problems
        return int(self.flag.item())


def norm_stays_on_device() -> bool:
    """Return whether upstream clips without a read by the host, by Transformer Engine's kernels."""
    return clip_grads.multi_tensor_scale_tensor_impl is not None


def flag_on_device(
    norm: float | torch.Tensor,
    others: Sequence[torch.Tensor],
    num_problems: int,
    device: torch.device,
) -> torch.Tensor:
    """Add up the problems of all ranks, without a read by the host.

    Args:
        norm: Upstream's norm.
        others: Gradients that the norm leaves out, such as those of tensor-parallel duplicates.
        num_problems: What is known to be wrong on this rank.
        device: Where the flag is reduced.

    Communication: one all-reduce of a single int32 over all ranks of the job.
    """
    flag = torch.full((1,), num_problems, dtype=torch.int32, device=device)
    flag += _num_not_finite([torch.as_tensor(norm, device=device).reshape(1), *_norms(others)])
    dist.all_reduce(flag)
    return flag


def norm_on_host(
    gradients: Sequence[tuple[dist.ProcessGroup, Sequence[torch.Tensor]]],
    others: Sequence[torch.Tensor],
    num_problems: int,
    device: torch.device,
) -> GradientNorm:
    """Take the norm of all gradients, by upstream's arithmetic without Transformer Engine.

    Args:
        gradients: Local gradients that count, with the group that their squares are added over.
        others: Gradients that the norm leaves out, such as those of tensor-parallel duplicates.
        num_problems: What is known to be wrong on this rank.
        device: Where norms are reduced.

    Communication: one all-reduce of a float32 for each group, and one of a single int32 over all
        ranks of the job.
    """
    squares = []
    for _, grads in gradients:
        norms = _norms(grads)
        square = torch.zeros(1, device=device)
        if norms:
            square += torch.linalg.vector_norm(torch.stack(norms)) ** 2
        squares.append(square)
    flag = torch.full((1,), num_problems, dtype=torch.int32, device=device)
    flag += _num_not_finite([*squares, *(norm.reshape(1) for norm in _norms(others))])
    dist.all_reduce(flag)
    for (group, _), square in zip(gradients, squares, strict=True):
        dist.all_reduce(square, group=group)
    # float64 holds both a float32 and the flag exactly.
    *found, problems = torch.cat([*squares, flag]).double().tolist()
    norms_of_groups = [square**0.5 for square in found]
    norm = norms_of_groups[0]
    if len(norms_of_groups) > 1:
        norm = math.sqrt(sum(each**2 for each in norms_of_groups))
    return GradientNorm(norm, None, int(problems))


def clip(gradients: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients in place, so that their norm is at most ``max_norm``."""
    coefficient = max_norm / (norm + _CLIP_EPSILON)
    if coefficient < 1.0 and gradients:
        torch._foreach_mul_(list(gradients), coefficient)


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    held = [tensor for tensor in tensors if tensor.numel() > 0]
    return list(torch._foreach_norm(held)) if held else []


def _num_not_finite(norms: Sequence[Any]) -> torch.Tensor:
    return (~torch.cat([norm.reshape(1) for norm in norms]).isfinite()).sum(dtype=torch.int32)
