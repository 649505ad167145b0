# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which gradients are not finite, found in one pass and without a read by the host."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class NotFinite(NamedTuple):
    """Gradients that are not finite.

    Args:
        number: How many there are, an integer scalar on the device.
        explain: Returns a sentence for every one of them; the host reads then.
    """

    number: torch.Tensor
    explain: Callable[[], list[str]]


def find_not_finite(grads: Sequence[tuple[str, torch.Tensor]], device: torch.device) -> NotFinite:
    """Look for NaN and Inf in gradients.

    Args:
        grads: Names of parameters, and their local gradients, none of them empty.
        device: Where they live.
    """
    # A norm is not finite where an element is not; it is a fused pass, and a fast one.
    norms = (
        torch._foreach_norm([grad for _, grad in grads])
        if grads
        else [torch.zeros((), device=device)]
    )
    # As of an embedding in CPU memory beside a model on a GPU.
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(device) for norm in norms]
    not_finite = ~torch.stack([norm.float() for norm in norms]).isfinite()

    def explain() -> list[str]:
        """Name the gradients that are not finite; the host reads here."""
        return [
            f"{fqn}: expected a finite gradient, got NaN or Inf, or a norm beyond float32, in a "
            f"shard of shape {tuple(grad.shape)}"
            for (fqn, grad), is_bad in zip(grads, not_finite.tolist(), strict=False)
            if is_bad
        ]

    return NotFinite(not_finite.sum(dtype=torch.int32), explain)
