# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a step: norm, clipping, and a check on all ranks before anything is updated.

The norm is not finite if a gradient is not. So the norm that clipping needs also finds NaN and Inf,
without a second pass over the gradients.

With Transformer Engine the norm stays on the device: clipping is launched before the host reads the
count of problems. Otherwise upstream reads every norm by itself, and scales tensor by tensor; here
the host reads norms and count together, one fused call computes the norms, and another one clips.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.tensors import AdjacentViews, find_not_finite


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
        others: Gradients not in ``norms``, for example of tensor-parallel duplicates.
        num_problems: Number of known problems of this rank.
        device: Device of the result.

    Returns:
        float32 of one element on the device, NaN where a norm is not finite on any rank.

    Communication: one all-reduce of a single float32 over all ranks of the job.
    """
    found = [norm.reshape(1) for norm in [*norms, *_norms(others)]]
    # Zero times Inf or NaN is NaN, and so is every sum with it.
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
        others: Gradients not in the norm, for example of tensor-parallel duplicates.
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


class LocalGradients:
    """Lists of local gradients, over the parameters that have rows on this rank.

    Most ranks hold rows of few parameters. Upstream counts the same parameters in every norm, so
    they are looked up once.

    Args:
        children: The optimizers of a model.
        fqns: Names of all parameters.
        stay: True if gradients are in the same memory in every step.

    Attributes:
        all: Local gradients of this step, of all optimizers.
        missing: The parameters that have rows here and no gradient, as sentences.
    """

    def __init__(
        self,
        children: Sequence[MegatronOptimizer],
        fqns: Mapping[Any, str],
        *,
        stay: bool,
    ) -> None:
        self._children = list(children)
        self._held = [
            param
            for child in children
            for param in child.get_parameters()
            if param._local_tensor.numel() > 0
        ]
        self._fqns = fqns
        self._stay = stay
        self._views = AdjacentViews()
        # Positions in ``all``: of each optimizer's norm, and of no norm.
        self._counted: list[list[int]] | None = None
        self._others: list[int] = []
        # Where a gradient is missing, positions are others, and the step is refused.
        self._num_listed = 0
        self.all: list[torch.Tensor] = []
        self.missing: list[str] = []

    def collect(self) -> None:
        """Look where the gradients of this step are; after they have been attached."""
        grads = [param.grad for param in self._held]
        self.all = [grad._local_tensor for grad in grads if grad is not None]
        self.missing = []
        if len(self.all) < len(grads):
            self.missing = [
                f"{self._fqns[param]}: expected a gradient on a shard of shape "
                f"{tuple(param._local_tensor.shape)}, got None"
                for param in self._held
                if param.grad is None
            ]
        if self._counted is None or len(self.all) != self._num_listed:
            self._find_counted()

    def _find_counted(self) -> None:
        position = {id(grad): number for number, grad in enumerate(self.all)}
        counted = [
            # Empty ones are left out: their norm is zero.
            [position[id(grad)] for grad in child.get_grads_for_grad_norm() if id(grad) in position]
            for child in self._children
        ]
        found = {number for of_child in counted for number in of_child}
        self._others = [number for number in range(len(self.all)) if number not in found]
        self._counted, self._num_listed = counted, len(self.all)

    @property
    def counted(self) -> list[list[torch.Tensor]]:
        """Return, by optimizer, the gradients of the norm."""
        assert self._counted is not None
        return [[self.all[number] for number in of_child] for of_child in self._counted]

    @property
    def others(self) -> list[torch.Tensor]:
        """Return the gradients that the norm leaves out."""
        return [self.all[number] for number in self._others]

    @property
    def joined(self) -> list[torch.Tensor]:
        """Return views of all gradients, those that are adjacent in memory as one."""
        return self._views.of(self.all)

    def end(self) -> None:
        """Release the gradients, and the views if memory changes between steps."""
        self.all = []
        if not self._stay:
            self._views.forget()
