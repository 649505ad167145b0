# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A function of the user's in place of Newton-Schulz."""

from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.standard import Standard

if TYPE_CHECKING:
    import torch


class Custom(Standard):
    """Call ``settings.function`` with stacks of whole matrices; costs are those of standard."""

    name = "custom"

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Check for a function."""
        return [] if settings.function is not None else ["expected a function, got none"]

    def run(self, stack: "torch.Tensor", call: Call) -> "torch.Tensor":
        """Orthogonalize a stack; see :meth:`Backend.run`.

        Raises:
            TypeError: The function returned something else than a stack like the given one.
        """
        import torch

        assert call.settings.function is not None
        result = call.settings.function(stack)
        if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (
            stack.shape,
            stack.dtype,
        ):
            got = (
                f"{tuple(result.shape)} {result.dtype}"
                if isinstance(result, torch.Tensor)
                else type(result).__name__
            )
            raise TypeError(
                f"newton_schulz: expected a function that returns {tuple(stack.shape)} "
                f"{stack.dtype}, as it was given, got {got}. Convert its result"
            )
        return result
