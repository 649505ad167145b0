# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Weight decay by emerging-optimizers' rules, all parameters of a group at once."""

from collections.abc import Callable, Mapping, Sequence

import torch

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
