# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the adaptive forms of Muon: settings of the second moment, and the scale."""

from collections.abc import Sequence
from typing import Any

from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, scale_settings


class FSDPAdaptiveMuon(FSDPZeROTensorParallelMuon):
    """Muon whose results are divided by a second moment, and scaled afterwards.

    Args:
        params: See :class:`FSDPZeROTensorParallelMuon`.
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.
        **muon_kwargs: See :class:`FSDPZeROTensorParallelMuon`.
    """

    def __init__(
        self, params: Any, *, beta2: float = 0.95, eps: float = 1e-8, **muon_kwargs: Any
    ) -> None:
        self._scale_mode, self._extra_scale_factor = scale_settings(muon_kwargs)
        super().__init__(params, **muon_kwargs)
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)

    def _factors(self, num_rows: int, num_cols: int) -> Sequence[float]:
        """Return the two factors of an update of some shape, to be multiplied with in turn.

        Their product would have other bits than upstream's.
        """
        factor = get_muon_scale_factor(num_rows, num_cols, mode=self._scale_mode)
        return factor, self._extra_scale_factor
