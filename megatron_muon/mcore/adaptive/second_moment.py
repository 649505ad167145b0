# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the adaptive forms of Muon: settings of the second moment, and the scale."""

from typing import Any

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon


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
        super().__init__(params, **muon_kwargs)
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)
