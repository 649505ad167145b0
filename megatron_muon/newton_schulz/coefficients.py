# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Coefficients of the steps; the sets are emerging-optimizers'."""

from functools import lru_cache

Coefficients = tuple[float, float, float]

# These sets repeat their last coefficients when steps outnumber them; the others start again from
# their first. Source: emerging-optimizers 0.3.0, muon_utils.newton_schulz.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")


@lru_cache
def coefficients_of(steps: int, coefficient_type: str) -> tuple[Coefficients, ...]:
    """Return ``(a, b, c)`` of each step: X becomes a X + b X X^T X + c (X X^T)^2 X."""
    # Imports torch.
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    sets = muon_utils._COEFFICIENT_SETS[coefficient_type]
    mode = "repeat_last" if coefficient_type in _REPEAT_LAST else "cycle"
    return tuple(muon_utils.get_coefficient_iterator(steps, sets, mode=mode))
