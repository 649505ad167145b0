# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of Newton-Schulz; the sets of coefficients are emerging-optimizers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.methods import Namo, StackMethod

if TYPE_CHECKING:
    import torch

Coefficients = tuple[float, float, float]


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
        function: Orthogonalizes stacks of float32 matrices ``(num_matrices, rows, cols)`` in place
            of Newton-Schulz; None for Newton-Schulz.
        method: Changes the results before they are scaled; None for nothing.
    """

    steps: int
    coefficient_type: str
    is_bf16: bool
    scale: Callable[[int, int], Sequence[float]]
    function: "Callable[[torch.Tensor], torch.Tensor] | None" = None
    method: StackMethod | Namo | None = None

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """Coefficients by step; see :func:`coefficients_of`."""
        return coefficients_of(self.steps, self.coefficient_type)


@lru_cache
def coefficients_of(steps: int, coefficient_type: str) -> tuple[Coefficients, ...]:
    """Return ``(a, b, c)`` by step: X becomes a X + b X X^T X + c (X X^T)^2 X.

    If there are more steps than coefficients, some sets repeat their last ones, and others start
    again with the first. Only the code of emerging-optimizers' function says which, so it is called
    with a diagonal matrix, and its result compared with both.

    Raises:
        ValueError: emerging-optimizers does not have the set, does not take this number of steps,
            or does neither.
    """
    # Imports torch.
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    sets = muon_utils._COEFFICIENT_SETS.get(coefficient_type)
    if sets is None:
        raise ValueError(
            f"coefficient_type: expected one of {sorted(muon_utils._COEFFICIENT_SETS)}, got "
            f"{coefficient_type!r}. Choose one"
        )
    # The first step beyond the set decides. More of them would amplify rounding: the polynomials
    # have no fixed point.
    num_compared = min(steps, len(sets) + 1)
    try:
        _upstream_values(steps, coefficient_type)
        expected = _upstream_values(num_compared, coefficient_type)
    except ValueError as error:
        raise ValueError(
            f"num_ns_steps: expected a number for {coefficient_type} coefficients, got {steps}. "
            f"{str(error).removesuffix('.')}"
        ) from error
    for mode in ("repeat_last", "cycle"):
        found = tuple(muon_utils.get_coefficient_iterator(steps, sets, mode=mode))
        values = [_value(x, found[:num_compared]) for x in _SINGULAR_VALUES]
        # Values are about 1, in fp32. The orders differ by 0.29 or more in all
        # sets of 0.3 and 0.4.
        if all(abs(a - b) < 1e-3 for a, b in zip(values, expected, strict=True)):
            return found
    raise ValueError(
        f"coefficient_type: expected emerging-optimizers to take the coefficients of "
        f"{coefficient_type} in order, and then the last or the first again, got the singular "
        f"values {expected} after {num_compared} steps. Choose another"
    )


_SINGULAR_VALUES = (0.6, 0.8)  # their norm is 1


def _upstream_values(steps: int, coefficient_type: str) -> list[float]:
    """Return the singular values after emerging-optimizers' own steps."""
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils
    from emerging_optimizers.utils import fp32_matmul_precision

    matrix = torch.tensor(_SINGULAR_VALUES, dtype=torch.float32, device="cpu").diag()
    with fp32_matmul_precision("highest"), torch.no_grad():
        return muon_utils.newton_schulz(matrix, steps, coefficient_type).diag().tolist()


def _value(x: float, coefficients: Sequence[Coefficients]) -> float:
    for a, b, c in coefficients:
        x = a * x + b * x**3 + c * x**5
    return x
