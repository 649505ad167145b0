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
    others = [pair for pair in zip(updates, grads, strict=True) if pair[0] is not pair[1]]
    if others:
        torch._foreach_copy_([update for update, _ in others], [grad for _, grad in others])
    torch._foreach_lerp_(list(updates), list(buffers), group["momentum"])
    return list(updates)
