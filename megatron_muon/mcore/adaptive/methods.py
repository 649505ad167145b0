# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The classes for ``--adaptive-muon-moment2-method``."""

import functools
import logging
from collections.abc import Mapping

from megatron.core.utils import log_single_rank

from megatron_muon.mcore.adaptive.adamuon import FSDPAdaMuon
from megatron_muon.mcore.adaptive.namo import FSDPNamo
from megatron_muon.mcore.adaptive.normuon import FSDPNorMuon
from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

logger = logging.getLogger(__name__)

METHODS: Mapping[str, type[FSDPZeROTensorParallelMuon]] = {
    "adamuon": FSDPAdaMuon,
    "normuon": FSDPNorMuon,
    "namo": FSDPNamo,
}


def adaptive_muon(method: str) -> type[FSDPZeROTensorParallelMuon]:
    """Return the class of a method, with a warning if upstream's results differ.

    Args:
        method: ``OptimizerConfig.adaptive_muon_moment2_method``.

    Raises:
        ValueError: Unknown method.
    """
    if method not in METHODS:
        raise ValueError(
            f"adaptive_muon_moment2_method: expected one of {', '.join(METHODS)}, got {method}. "
            "Set --adaptive-muon-moment2-method."
        )
    if method != "adamuon":
        _warn_of_scale(method)
    return METHODS[method]


# Once, though experts and dense matrices have two optimizers.
@functools.cache
def _warn_of_scale(method: str) -> None:
    log_single_rank(
        logger,
        logging.WARNING,
        "%s: results are scaled once, as in emerging-optimizers 0.3.0; Megatron-LM main of "
        "2026-08-22 scales them twice",
        method,
    )
