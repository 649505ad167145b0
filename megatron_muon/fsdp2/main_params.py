# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies in float32 of parameters in bfloat16, which would round most of an update away."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.runtime.dtensor_layout import local_tensor

KEY = "main_param"


class MainParams:
    """Keep the float32 copies in the state of an optimizer.

    Args:
        params: All parameters; those in float32 need no copy.

    Memory: 4 bytes per local element of a parameter in bfloat16.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = list(params)
        self._narrow = [param for param in params if param.dtype != torch.float32]

    def create(self, state: dict[torch.Tensor, Any]) -> None:
        """Add the copies that are missing."""
        for param in self._narrow:
            if KEY not in state[param]:
                state[param][KEY] = param.detach().float()

    def weights(self, state: dict[torch.Tensor, Any]) -> dict[torch.Tensor, torch.Tensor]:
        """Return what a step changes, by parameter: local tensors in float32.

        An element that somebody has changed since the last step, as by loading weights, is not its
        copy rounded, and is copied. Versions of tensors do not tell: those of DTensors stay.
        """
        weights = {param: local_tensor(param) for param in self._params}
        for param in self._narrow:
            own, main = weights[param], local_tensor(state[param][KEY])
            main.copy_(torch.where(main.to(own.dtype) == own, main, own))
            weights[param] = main
        return weights

    def install(self, weights: dict[torch.Tensor, torch.Tensor]) -> None:
        """Round the copies into the parameters, after a step."""
        if not self._narrow:
            return
        torch._foreach_copy_(
            [local_tensor(param) for param in self._narrow],
            [weights[param] for param in self._narrow],
        )
