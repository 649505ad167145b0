# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies in float32 of parameters in bfloat16, which would round most of an update away."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.dtensor_layout import local_tensor

KEY = "main_param"


class MainParams:
    """Keep the float32 copies in the state of an optimizer.

    Args:
        params: All parameters; those in float32 need no copy.

    Memory: 4 bytes per local element of a parameter in bfloat16.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._narrow = [param for param in params if param.dtype != torch.float32]

    def create(self, state: dict[torch.Tensor, Any]) -> None:
        """Add the copies that are missing."""
        for param in self._narrow:
            if KEY not in state[param]:
                state[param][KEY] = param.detach().float()

    def follow(self, state: dict[torch.Tensor, Any]) -> list[str]:
        """Copy what somebody has changed since the last step, as by loading weights.

        Such an element is not its copy rounded. Versions of tensors do not tell: those of DTensors
        stay. Called before ranks agree to step, as it needs memory: 7 bytes an element of the
        largest parameter.

        Returns:
            What is missing, as sentences.
        """
        try:
            for param in self._narrow:
                own, main = local_tensor(param), local_tensor(state[param][KEY])
                main.copy_(torch.where(main.to(own.dtype) == own, main, own))
        # A GPU raises torch.OutOfMemoryError, which is one of these.
        except RuntimeError as error:
            return [
                f"expected memory to compare weights with their copies, got {first_line(error)}"
            ]
        return []

    def install(self, state: dict[torch.Tensor, Any]) -> None:
        """Round the copies into the parameters, after a step."""
        if self._narrow:
            torch._foreach_copy_(
                [local_tensor(param) for param in self._narrow],
                [local_tensor(state[param][KEY]) for param in self._narrow],
            )
