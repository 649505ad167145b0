# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for models sharded with ``torch.distributed.fsdp.fully_shard``; needs no megatron.

::

    from megatron_muon.fsdp2 import MuonAdamW

    optimizer = MuonAdamW.from_model(model, lr=1e-3)

Files, each importing only those above it::

    parameters   planned views of plain tensors, convolutions and Megatron-FSDP's parameters
    gradients    agreement on missing and non-finite gradients
    settings     keyword arguments of Muon
    validation   refuses parameters at construction
    loading      refuses optimizer states, on load or later
    muon         Muon: its plan, step and state
    fused        layout of a matrix, from its module
    groups       the parameters of a model, sorted by evidence
    muon_adamw   Muon, AdamW and Lion in one optimizer
    from_parameters  MuonAdamW, from parameters alone
"""

from megatron_muon.step.dependencies import missing_names

# The imports below would raise errors without advice.
if _missing := missing_names():
    raise ImportError("megatron_muon.fsdp2 cannot be imported:\n  " + "\n  ".join(_missing))

from megatron_muon.fsdp2.from_parameters import from_parameters
from megatron_muon.fsdp2.groups import parameter_groups
from megatron_muon.fsdp2.muon import Muon
from megatron_muon.fsdp2.muon_adamw import MuonAdamW
from megatron_muon.fsdp2.settings import MuonArguments
from megatron_muon.newton_schulz.settings import StackMethod
from megatron_muon.plan.settings import ExchangeSettings

__all__ = [
    "ExchangeSettings",
    "Muon",
    "MuonAdamW",
    "MuonArguments",
    "StackMethod",
    "from_parameters",
    "parameter_groups",
]
