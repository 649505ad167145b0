# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for Megatron-FSDP: whole-matrix orthogonalization of row-sharded momentum.

Importing this package changes nothing. ``enable()`` patches an installed megatron-core so that
``--optimizer muon --use-megatron-fsdp`` trains; ``disable()`` reverts the patches. docs/api.md
describes the public names.

Parts, each importing only those above it::

    user_errors     errors that the user can repair
    newton_schulz/  ways to compute Newton-Schulz, and their costs
    plan/           owners of matrices, and routes of rows; no torch
    runtime/        runs a plan; torch.distributed, no megatron
    rows/           rows of parameters by rank, and the inputs of plans
    step/           the optimizer step of both front ends, and its state
    fsdp2/          Muon for the DTensors of plain FSDP2; no megatron
    mcore/          all code that imports megatron: optimizer, flags, checkpoints, patches
    bridge          configuration of the optimizer for Megatron-Bridge
    launcher        ``torchrun ... -m megatron_muon SCRIPT ARGS``
    tools/          commands that no training process imports
    check           ``python -m megatron_muon.check``
    checkpoint      ``python -m megatron_muon.checkpoint``
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_muon.mcore.enable import disable, enable, is_enabled
    from megatron_muon.mcore.factory import build_megatron_fsdp_emerging_optimizer  # noqa: F401
    from megatron_muon.mcore.versions import IncompatibleMegatronError
    from megatron_muon.plan.settings import ExchangeSettings

__version__ = "0.1.0"
# Without build_megatron_fsdp_emerging_optimizer: a star import would import megatron.
__all__ = [
    "ExchangeSettings",
    "IncompatibleMegatronError",
    "__version__",
    "disable",
    "enable",
    "is_enabled",
]

# Imported at first use: FSDP2 needs nothing of mcore, and the builder imports megatron.
_LAZY = {
    "ExchangeSettings": "megatron_muon.plan.settings",
    "IncompatibleMegatronError": "megatron_muon.mcore.versions",
    "build_megatron_fsdp_emerging_optimizer": "megatron_muon.mcore.factory",
    **dict.fromkeys(("disable", "enable", "is_enabled"), "megatron_muon.mcore.enable"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY})


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
