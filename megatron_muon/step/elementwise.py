# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Elementwise parts of a step: weight decay and momentum of a whole group, and scale factors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon import MuonScaleT

# Factors of a weight that is decayed by (weight decay, learning rate); "l2" decays the gradient.
# Source: emerging-optimizers 0.3.0, WeightDecayMixin.
_FACTORS: Mapping[str, Callable[[float, float], float]] = {
    "decoupled": lambda decay, lr: decay * lr,
    "independent": lambda decay, lr: decay,
    "palm": lambda decay, lr: decay * lr * lr,
}
WEIGHT_DECAY_METHODS = (*_FACTORS, "l2")


def decay_weights(
    method: str,
    weights: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """Decay weights in place, or with ``l2`` their gradients; the bits are upstream's.

    Args:
        method: ``decoupled``, ``independent``, ``palm`` or ``l2``.
        weights: Local tensors.
        grads: Their gradients, of the same shapes.
        lr: Learning rate.
        weight_decay: Coefficient.

    Raises:
        ValueError: Unknown method.
    """
    if weight_decay == 0.0 or not weights:
        return
    if method == "l2":
        torch._foreach_add_(list(grads), list(weights), alpha=weight_decay)
    elif method in _FACTORS:
        factor = _FACTORS[method](weight_decay, lr)
        torch._foreach_add_(list(weights), list(weights), alpha=-factor)
    else:
        raise ValueError(
            f"weight decay: expected one of {WEIGHT_DECAY_METHODS}, got {method!r}. Set "
            "weight_decay_method accordingly."
        )


def advance_momentum(
    group: Mapping[str, Any],
    weights: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    *,
    weight_decay_method: str,
    nesterov: bool,
    updates: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Decay weights, and average gradients into momentum, with emerging-optimizers' bits.

    Args:
        group: Of which ``lr``, ``weight_decay`` and ``momentum`` are read.
        weights: Local tensors of one dtype.
        grads: Their gradients. Weight decay of method ``l2`` is added to them.
        buffers: Their momentum, changed in place.
        weight_decay_method: See :func:`decay_weights`.
        nesterov: Whether the gradient is averaged in once more.
        updates: Output tensors of that average. Pass ``grads`` to overwrite them.

    Returns:
        What is orthogonalized: the momentum itself, with Nesterov the updates.
    """
    # torch has no foreach function for an empty list.
    if not weights:
        return []
    decay_weights(
        weight_decay_method,
        weights,
        grads,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
    )
    torch._foreach_lerp_(list(buffers), list(grads), 1 - group["momentum"])
    if not nesterov:
        return list(buffers)
    copied = [i for i, update in enumerate(updates) if update is not grads[i]]
    if copied:
        torch._foreach_copy_([updates[i] for i in copied], [grads[i] for i in copied])
    torch._foreach_lerp_(list(updates), list(buffers), group["momentum"])
    return list(updates)


# Name: emerging-optimizers' mode, and a factor.
_OTHER_SCALES: dict[str, tuple[MuonScaleT | None, float]] = {
    # The RMS of an update is that of AdamW's. Source: arXiv:2502.16982.
    "match_adamw": ("spectral", 0.2),
    # sqrt(outputs / inputs), torch's name for it. Source: torch 2.14, torch/optim/_muon.py.
    "spectral_unclamped": ("unit_rms_norm", 1.0),
    "none": (None, 1.0),
}
# Maps outputs and inputs of a matrix to two factors.
type Scale = Callable[[int, int], tuple[float, float]]
SCALE_MODES = (*get_args(MuonScaleT), *_OTHER_SCALES)


def scale_function(mode: str, extra_factor: float) -> Scale:
    """Return a function from rows and columns to two factors.

    emerging-optimizers multiplies with one after the other, and so do we: for the same bits.
    """
    upstream, factor = _OTHER_SCALES.get(mode, (mode, 1.0))

    def scale(rows: int, cols: int) -> tuple[float, float]:
        """Return the factors of a matrix."""
        by_shape = 1.0 if upstream is None else get_muon_scale_factor(rows, cols, mode=upstream)
        return by_shape, factor * extra_factor

    return scale
