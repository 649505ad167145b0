# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Second moments of emerging-optimizers' ``AdaptiveMuon`` by name, and what they ask of a step."""

from collections.abc import Sequence

import torch

from megatron_muon.newton_schulz.methods import Namo, NorMuon, StackMethod
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import StepHooks
from megatron_muon.runtime.owner_compute import OwnerCompute

METHODS = ("adamuon", "normuon", "namo")


def method_of(name: str | None, beta2: float, eps: float) -> StackMethod | Namo | None:
    """Return what changes the results of whole matrices; None for adamuon, which needs none.

    Args:
        name: One of :data:`METHODS`.
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.
    """
    if name == "normuon":
        return NorMuon(beta2, eps)
    return Namo(beta2, eps) if name == "namo" else None


def method_problems(name: str, weight_decay_method: str) -> list[str]:
    """List what cannot work, a sentence each.

    Args:
        name: Of a method.
        weight_decay_method: Of the optimizer.
    """
    if name not in METHODS:
        return [f"adaptive: expected one of {', '.join(METHODS)}, got {name}. Choose one"]
    if name == "namo" and weight_decay_method == "l2":
        return [
            "adaptive: expected decoupled weight decay with namo, which averages norms of "
            "gradients, got l2, which adds the decay to them. Choose another"
        ]
    return []


class GradientNorms(StepHooks):
    """Show gradients to a method that needs their norms.

    Args:
        params: By position, the parameters of which this rank holds rows.
        compute: Orthogonalizes their matrices.
    """

    def __init__(self, params: Sequence[torch.Tensor], compute: OwnerCompute) -> None:
        self._params, self._compute = list(params), compute

    def begin(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Sum squares, before gradients are overwritten."""
        by_param = dict(zip(self._params, grads, strict=True))
        for param, grad in by_param.items():
            if grad is None:
                # Moments of a parameter without a gradient are kept.
                local = local_tensor(param)
                by_param[param] = torch.zeros((), device=local.device).expand(local.shape)
        self._compute.see_gradients(
            {rows: rows.of(by_param[rows.param]) for rows in self._compute.handles}
        )
