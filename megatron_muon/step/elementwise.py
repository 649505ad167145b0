# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Elementwise parts of a step: decay, momentum, scale factors; memory of other optimizers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon import MuonScaleT

from megatron_muon.newton_schulz.settings import Scale
from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v1
from megatron_muon.runtime.arena import OtherBytes
from megatron_muon.runtime.tensors import local_tensor

type TensorList = list[torch.Tensor] | tuple[torch.Tensor, ...]

# Methods of emerging-optimizers, and cautious.
WeightDecayMethod = Literal["decoupled", "independent", "palm", "l2", "cautious"]
WEIGHT_DECAY_METHODS = get_args(WeightDecayMethod)
# Factors of a weight that is decayed before its update, by (weight decay, learning rate).
# Source: emerging-optimizers 0.3.0, WeightDecayMixin.
_FACTORS: Mapping[str, Callable[[float, float], float]] = {
    "decoupled": lambda decay, lr: decay * lr,
    "independent": lambda decay, lr: decay,
    "palm": lambda decay, lr: decay * lr * lr,
}


def decay_before_update(
    method: str,
    weights: TensorList,
    grads: TensorList,
    group: Mapping[str, Any],
) -> None:
    """Decay weights in place, or with ``l2`` their gradients; ``cautious`` decays later.

    Args:
        method: One of ``WEIGHT_DECAY_METHODS``; the bits are emerging-optimizers'.
        weights: Local tensors.
        grads: Their gradients, of the same shapes.
        group: Parameter group, of which ``lr`` and ``weight_decay`` are read.
    """
    decay = group["weight_decay"]
    if decay == 0.0 or method == "cautious":
        return
    if method == "l2":
        torch._foreach_add_(grads, weights, alpha=decay)
    else:
        torch._foreach_add_(weights, weights, alpha=-_FACTORS[method](decay, group["lr"]))


def add_cautious_decay(updates: TensorList, weights: TensorList, weight_decay: float) -> None:
    """Add the decay of weights to updates where their product is not negative.

    Method: cautious weight decay (https://arxiv.org/abs/2510.12402).

    Args:
        updates: Updates that are multiplied by the learning rate and subtracted next.
        weights: Local tensors, of the same shapes.
        weight_decay: Coefficient.

    Memory: a tensor like each update.
    """
    if weight_decay == 0.0:
        return
    decays = torch._foreach_mul(updates, weights)
    # 1 where the product is not negative, else 0.
    torch._foreach_sign_(decays)
    torch._foreach_add_(decays, 1.0)
    torch._foreach_clamp_max_(decays, 1.0)
    torch._foreach_mul_(decays, weights)
    torch._foreach_add_(updates, decays, alpha=weight_decay)


def advance_momentum(
    group: Mapping[str, Any],
    grads: TensorList,
    momentum: TensorList,
    updates: TensorList | None,
) -> None:
    """Average gradients into momentum, with emerging-optimizers' bits.

    Args:
        group: Parameter group, of which ``momentum`` is read.
        grads: Local gradients.
        momentum: Changed in place.
        updates: Output tensors of Nesterov's momentum, which averages the gradient in once more;
            None without it. Pass ``grads`` to overwrite them.
    """
    torch._foreach_lerp_(momentum, grads, 1 - group["momentum"])
    if updates is not None:
        if updates is not grads:
            torch._foreach_copy_(updates, grads)
        torch._foreach_lerp_(updates, momentum, group["momentum"])


# Name: emerging-optimizers' mode, and a factor.
_OTHER_SCALES: dict[str, tuple[MuonScaleT | None, float]] = {
    # Updates have the RMS of AdamW's. Source: arXiv:2502.16982.
    "match_adamw": ("spectral", 0.2),
    # sqrt(outputs / inputs), torch's name for it. Source: torch 2.14, torch/optim/_muon.py.
    "spectral_unclamped": ("unit_rms_norm", 1.0),
    "none": (None, 1.0),
}
SCALE_MODES = (*get_args(MuonScaleT), *_OTHER_SCALES)


def scale_function(mode: str, extra_factor: float) -> Scale:
    """Return a function from rows and columns to two factors.

    emerging-optimizers multiplies by one after the other; so does a step, for the same bits.
    """
    upstream, factor = _OTHER_SCALES.get(mode, (mode, 1.0))

    def scale(rows: int, cols: int) -> tuple[float, float]:
        """Return the factors of a matrix."""
        by_shape = 1.0 if upstream is None else get_muon_scale_factor(rows, cols, mode=upstream)
        return by_shape, factor * extra_factor

    return scale


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Step an internal optimizer without the hooks that users register for all optimizers.

    torch calls them around every ``step()``.

    Source: torch 2.15, torch/optim/optimizer.py, Optimizer.profile_hook_step.
    """
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


@contextmanager
def state_of_empty_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer step empty shards whose gradients have another empty shape, or are missing.

    Megatron-FSDP's version 1 gives them no gradients, and its checkpoints gather every tensor of
    every state: they hang where a rank lacks some of them.
    """
    empty = [
        (param, param.grad)
        for group in optimizer.param_groups
        for param in group["params"]
        if not local_tensor(param).numel() and (param.grad is not None or is_of_fsdp_v1(param))
    ]
    for param, _ in empty:
        param.grad = torch.zeros_like(param)
    try:
        yield
    finally:
        for param, grad in empty:
            param.grad = grad


def elementwise_bytes(
    optimizers: Iterable[torch.optim.Optimizer], device: torch.device
) -> OtherBytes:
    """Return the memory of the next step of torch's Adam and of Lion, one after the other.

    The largest group decides about temporaries, or the largest parameter where parameters are
    stepped one by one. Fused kernels have none.

    Source: torch 2.15, torch/optim/adam.py, _single_tensor_adam and _multi_tensor_adam.
    """
    new_state, temporaries = 0, 0
    for optimizer in optimizers:
        is_adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        for group in optimizer.param_groups:
            sizes = {
                param: local.nbytes
                for param in group["params"]
                if param.grad is not None and (local := local_tensor(param)).device == device
            }
            num_states = 2 + group["amsgrad"] if is_adam else 1
            new_state += num_states * sum(sizes[p] for p in sizes if not optimizer.state.get(p))
            if group.get("fused"):
                continue
            is_copied = is_adam and (
                group["maximize"]
                or (group["weight_decay"] and not group.get("decoupled_weight_decay"))
            )
            num_bytes = sum(sizes.values())
            if group.get("foreach") is False:
                # One by one, temporaries of the parameter before are still there.
                num_bytes = 3 * max(sizes.values(), default=0)
            temporaries = max(temporaries, num_bytes * (3 if is_copied else 1))
    return OtherBytes(new_state, temporaries)
