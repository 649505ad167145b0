# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step does before it orthogonalizes: all parameters of a group at once, elementwise."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_muon.runtime.weight_decay import decay_weights


def advance_momentum(
    group: Mapping[str, Any],
    weights: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    *,
    weight_decay_method: str,
    nesterov: bool,
    overwrites_gradients: bool,
) -> list[torch.Tensor]:
    """Decay weights, and average gradients into momentum, with emerging-optimizers' bits.

    Args:
        group: Of which ``lr``, ``weight_decay`` and ``momentum`` are read.
        weights: Local tensors of one dtype.
        grads: Their gradients. Weight decay of method ``l2`` is added to them.
        buffers: Their momentum, changed in place.
        weight_decay_method: See :func:`decay_weights`.
        nesterov: Whether the gradient is averaged in once more.
        overwrites_gradients: Whether that is written over the gradients, which saves memory.

    Returns:
        What is orthogonalized: the momentum itself, with Nesterov the gradients' memory or new one.
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
    if not overwrites_gradients:
        return list(torch._foreach_lerp(list(grads), list(buffers), group["momentum"]))
    torch._foreach_lerp_(list(grads), list(buffers), group["momentum"])
    return list(grads)
