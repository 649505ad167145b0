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
    report/         time, bytes and memory of a plan; plans of jobs that do not run
    runtime/        runs a plan; torch.distributed, no megatron
    rows/           rows of parameters by rank, and the inputs of plans
    step/           the optimizer step of both front ends, and its state
    fsdp2/          Muon for the DTensors of plain FSDP2; no megatron
    checkpoint/     reads, verifies and converts checkpoint files, without megatron
    mcore/          all code that imports megatron: optimizer, flags, checkpoints, patches
    bridge          configuration of the optimizer for Megatron-Bridge
    check/          checks a machine, and measures its rates
    launcher        ``torchrun ... -m megatron_muon SCRIPT ARGS``
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_muon.mcore.enable import disable, enable, is_enabled
from megatron_muon.mcore.versions import IncompatibleMegatronError

if TYPE_CHECKING:
    from megatron_muon.mcore.factory import build_megatron_fsdp_emerging_optimizer  # noqa: F401
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

# Imported at first use: the builder imports megatron and torch.
_LAZY = {
    "ExchangeSettings": "megatron_muon.plan.settings",
    "build_megatron_fsdp_emerging_optimizer": "megatron_muon.mcore.factory",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY})


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
