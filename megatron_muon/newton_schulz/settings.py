# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of Newton-Schulz, and the scale of its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
