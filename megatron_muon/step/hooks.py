# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Additions to a step: functions of gradients, of momentum, and of results before they are applied.

A step calls them in this order, and the hooks of one kind in the order of ``MatrixStep.hooks``,
which ``MuonStep.record_metrics()`` sets: second moments, then metrics, then weight decay. So
metrics see updates as a method returns them, without decay and learning rate.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import TensorList, add_cautious_decay

# State of AdaMuon, like its parameter.
MOMENT2_BUFFER = "moment2_buffer"


class StepHooks:
    """Functions that a step calls; in this base class they do nothing.

    Attributes:
        num_copies: Maximum number of tensors like a result that ``on_results()`` allocates.
    """

    num_copies: int = 0

    def on_gradients(self, weights: TensorList, grads: Sequence[torch.Tensor | None]) -> None:
        """Read weights and gradients by position, before weight decay."""

    def on_momentum(self, weights: TensorList, momentum: TensorList) -> None:
        """Read decayed weights and the new momentum by position, before the exchange."""

    def on_results(
        self,
        group: Mapping[str, Any],
        positions: Sequence[int],
        weights: TensorList,
        results: TensorList,
    ) -> None:
        """Change results, which are multiplied by ``lr`` and subtracted from weights next.

        Args:
            group: Parameter group.
            positions: Some parameters of the group.
            weights: Their weights, float32.
            results: Their results, float32.
        """


class CautiousDecay(StepHooks):
    """Decay weights where results have their sign; see ``add_cautious_decay()``."""

    num_copies = 1

    def on_results(
        self,
        group: Mapping[str, Any],
        positions: Sequence[int],
        weights: TensorList,
        results: TensorList,
    ) -> None:
        """Add decay to results."""
        add_cautious_decay(results, weights, group["weight_decay"])


class AdaMuonSettings(NamedTuple):
    """Settings of AdaMuon.

    Args:
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.
        factors: Returns the two factors of results of a parameter.
    """

    beta2: float
    eps: float
    factors: Callable[[PlannedParameter], tuple[float, float]]


class AdaMuon(StepHooks):
    """Divide results by the root of a second moment for each element, and scale them.

    Method: AdaMuon (https://arxiv.org/abs/2507.11005).

    Args:
        state_of: Returns the state by position, with a second moment like the parameter.
        parameters: By position.
        settings: Settings.
    """

    num_copies = 1

    def __init__(
        self,
        state_of: Callable[[int], Mapping[str, Any]],
        parameters: Sequence[PlannedParameter],
        settings: AdaMuonSettings,
    ) -> None:
        self._state_of, self._settings = state_of, settings
        self._factors = list(map(settings.factors, parameters))

    def on_results(
        self,
        group: Mapping[str, Any],
        positions: Sequence[int],
        weights: TensorList,
        results: TensorList,
    ) -> None:
        """Divide results by the root of their second moment, and scale them."""
        moments = [local_tensor(self._state_of(i)[MOMENT2_BUFFER]) for i in positions]
        roots = torch._foreach_mul(results, results)
        torch._foreach_lerp_(moments, roots, 1 - self._settings.beta2)
        torch._foreach_copy_(roots, moments)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, self._settings.eps)
        torch._foreach_div_(results, roots)
        for factors in zip(*(self._factors[position] for position in positions), strict=True):
            torch._foreach_mul_(results, list(factors))
