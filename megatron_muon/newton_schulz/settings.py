# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of Newton-Schulz, with the coefficients of emerging-optimizers."""

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
    """Settings of orthogonalization and scale.

    Args:
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        is_bf16: Whether it runs in bf16 (matmul precision "medium"); its results are then
            bf16-valued, and are sent back as bf16 with any ``comm_dtype``.
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
    again with the first. emerging-optimizers' function decides: it is called once, and its steps
    are recorded in place of being computed.

    Raises:
        ValueError: emerging-optimizers does not have the set, or does not take the number of steps.
    """
    # Imports torch.
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    if coefficient_type not in muon_utils._COEFFICIENT_SETS:
        raise ValueError(
            f"coefficient_type: expected one of {sorted(muon_utils._COEFFICIENT_SETS)}, got "
            f"{coefficient_type!r}. Choose one"
        )
    found: list[Coefficients] = []

    def record(x: "torch.Tensor", *coefficients: float, **_: object) -> "torch.Tensor":
        """Take a step of upstream's function that records its coefficients."""
        found.append(coefficients)  # type: ignore[arg-type]
        return x

    step = muon_utils.newton_schulz_step
    muon_utils.newton_schulz_step = record
    try:
        muon_utils.newton_schulz(torch.ones(1, 1, device="cpu"), steps, coefficient_type)
    except ValueError as error:
        raise ValueError(
            f"num_ns_steps: expected a number for {coefficient_type} coefficients, got {steps}. "
            f"{str(error).removesuffix('.')}"
        ) from error
    finally:
        muon_utils.newton_schulz_step = step
    if [len(each) for each in found] != [3] * steps:
        raise ValueError(
            f"num_ns_steps: expected emerging-optimizers to take {steps} steps of three "
            f"coefficients for {coefficient_type}, got {found}. Install another release"
        )
    return tuple(found)
