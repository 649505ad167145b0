# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz of emerging-optimizers on whole matrices: nothing of it is this package's."""

import math
from unittest import mock

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.standard import least_norm

STEPS, COEFFICIENTS = 5, "quintic"


def settings(*, is_bf16: bool = True) -> NewtonSchulzSettings:
    """Return the settings of these steps, without a scale."""
    return NewtonSchulzSettings(STEPS, COEFFICIENTS, is_bf16, lambda rows, cols: (1.0,))


def float64_normalize(x: torch.Tensor, p: int, dim: tuple[int, int], eps: float) -> torch.Tensor:
    """Divide by the norm summed in float64: as documented for ``comm_dtype`` bf16."""
    assert (p, dim) == (2, (-2, -1))
    return x / x.double().square().sum().sqrt().clamp_min(eps).float()


def orthogonalized(matrix: torch.Tensor, precision: str, *, has_float64_norm: bool) -> torch.Tensor:
    """Orthogonalize one whole matrix by upstream's function.

    Args:
        matrix: ``(rows, cols)`` float32, contiguous.
        precision: ``medium`` for bf16, ``highest`` for fp32.
        has_float64_norm: Whether its norm is summed in float64.

    Returns:
        ``(rows, cols)`` float32.
    """
    with fp32_matmul_precision(precision):
        if not has_float64_norm:
            return muon_utils.newton_schulz(matrix, STEPS, COEFFICIENTS)
        with mock.patch("torch.nn.functional.normalize", float64_normalize):
            return muon_utils.newton_schulz(matrix, STEPS, COEFFICIENTS)


def normalized_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """Divide by the float64 norm and round to bf16: where "medium" precision starts."""
    return float64_normalize(matrix, 2, (-2, -1), least_norm()).bfloat16()


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference, relative to what is expected; inf for NaN."""
    difference = (found.double() - expected.double()).norm()
    relative = (difference / expected.double().norm().clamp_min(1e-30)).item()
    # Comparisons with NaN are false: it would pass for the smallest of all.
    return math.inf if math.isnan(relative) else relative
