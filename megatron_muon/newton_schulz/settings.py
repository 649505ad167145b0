# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of Newton-Schulz; the sets of coefficients are emerging-optimizers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Coefficients = tuple[float, float, float]

# These sets repeat their last coefficients if there are more steps; the others start again from
# the first. Source: emerging-optimizers 0.3.0, muon_utils.newton_schulz.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")


@dataclass(frozen=True)
class NewtonSchulzSettings:
    """How matrices are orthogonalized and scaled.

    Args:
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        is_bf16: Whether it runs in bf16 (matmul precision "medium"); its results are then
            bf16-valued, and are sent as bf16 in either wire dtype.
        scale: Returns the factors of a result by ``(rows, cols)`` of the whole block; it is
            multiplied with them in fp32, one after the other.
    """

    steps: int
    coefficient_type: str
    is_bf16: bool
    scale: Callable[[int, int], Sequence[float]]

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """Coefficients by step; see :func:`coefficients_of`."""
        return coefficients_of(self.steps, self.coefficient_type)


@lru_cache
def coefficients_of(steps: int, coefficient_type: str) -> tuple[Coefficients, ...]:
    """Return ``(a, b, c)`` by step: X becomes a X + b X X^T X + c (X X^T)^2 X."""
    # Imports torch.
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    sets = muon_utils._COEFFICIENT_SETS[coefficient_type]
    mode = "repeat_last" if coefficient_type in _REPEAT_LAST else "cycle"
    return tuple(muon_utils.get_coefficient_iterator(steps, sets, mode=mode))
