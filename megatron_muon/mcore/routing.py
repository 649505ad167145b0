# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which optimizer steps a parameter: Megatron's rule, with additions for Muon."""

import copy
from typing import Any

import torch
from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamPredicate

from megatron_muon.mcore.arguments import skips_router


def routing_rule(config: OptimizerConfig) -> dict[ParamKey, Any]:
    """Return the overrides that assign parameters to a scalar optimizer.

    Megatron's rule selects parameters that are not matrices. With Muon,
    ``config.muon_scalar_optimizer`` steps them, and parameters that later releases mark; with Lion,
    Adam does.
    """
    rule = copy.deepcopy(_EMERGING_OPTIMIZERS[config.optimizer].default_param_overrides)
    if config.optimizer == "lion":
        return rule
    to_scalar = {"optimizer": config.muon_scalar_optimizer}
    for override in rule.values():
        override.update(to_scalar)
    excluded = ParamPredicate(name="asks_for_another_optimizer", fn=_is_excluded)
    return {**rule, ParamKey(predicate=excluded): to_scalar, **router_rule(config)}


def router_rule(config: OptimizerConfig) -> dict[ParamKey, Any]:
    """Return the override of ``--moe-router-skip-muon``; empty without the flag."""
    if not skips_router():
        return {}
    return {ParamKey(name="*.router.weight"): {"optimizer": config.muon_scalar_optimizer}}


def _is_excluded(param: torch.Tensor) -> bool:
    """Return whether a module asks for another optimizer, as Mamba does for ``in_proj``."""
    return getattr(param, "use_muon", True) is False
