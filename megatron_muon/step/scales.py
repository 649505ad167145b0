# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Scale factors of results by name: emerging-optimizers' modes, and others that users know."""

from collections.abc import Callable
from typing import get_args

from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon import MuonScaleT

# Name: emerging-optimizers' mode, and a factor.
_OTHERS: dict[str, tuple[MuonScaleT | None, float]] = {
    # The RMS of an update is that of AdamW's. Source: arXiv:2502.16982.
    "match_adamw": ("spectral", 0.2),
    # sqrt(outputs / inputs), torch's name for it. Source: torch 2.14, torch/optim/_muon.py.
    "spectral_unclamped": ("unit_rms_norm", 1.0),
    "none": (None, 1.0),
}
# From outputs and inputs of a matrix to two factors.
type Scale = Callable[[int, int], tuple[float, float]]
SCALE_MODES = (*get_args(MuonScaleT), *_OTHERS)


def scale_function(mode: str, extra_factor: float) -> Scale:
    """Return a function from rows and columns to two factors.

    emerging-optimizers multiplies with one after the other, and so do we: for the same bits.
    """
    upstream, factor = _OTHERS.get(mode, (mode, 1.0))

    def scale(rows: int, cols: int) -> tuple[float, float]:
        """Return the factors of a matrix."""
        by_shape = 1.0 if upstream is None else get_muon_scale_factor(rows, cols, mode=upstream)
        return by_shape, factor * extra_factor

    return scale
