# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The optimizers that ``fsdp2_step.py`` compares, over parameters sharded by ``fully_shard``."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.95, 0.1
OURS, OURS_FP32 = "megatron_muon", "megatron_muon, wire fp32"
# Modules of the peers that may not be installed.
PACKAGES = {
    "dion": "dion",
    "muon-fsdp2": "muon_fsdp2",
    "dtensor-muon": "dtensor_muon",
    "muonium": "muonium",
}

Params = list[torch.nn.Parameter]
Builder = Callable[[Params], torch.optim.Optimizer]


def _ours(wire: Any) -> Builder:
    def build(params: Params) -> torch.optim.Optimizer:
        """Build this package's optimizer, with torch's coefficients and scale."""
        from megatron_muon.fsdp2 import ExchangeSettings, Muon

        exchange = ExchangeSettings(wire=wire)
        keys: Any = {"coefficient_type": "simple", "scale_mode": "shape_scaling", "nesterov": True}
        return Muon(params, LR, MOMENTUM, WEIGHT_DECAY, exchange=exchange, **keys)

    return build


def _dion(params: Params) -> torch.optim.Optimizer:
    """Build dion's Muon over the axis that shards, as its documentation asks for."""
    from torch.distributed.tensor import DTensor

    first = params[0]
    assert isinstance(first, DTensor)
    mesh: Any = first.device_mesh
    if mesh.ndim > 1:
        # Of hybrid sharding; it has no tensor parallelism.
        mesh = mesh[mesh.mesh_dim_names[1]]
    return importlib.import_module("dion").Muon(
        params,
        distributed_mesh=mesh,
        lr=LR,
        mu=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        nesterov=True,
        adjust_lr="spectral_norm",
        use_polar_express=False,
    )


def _muon_fsdp2(params: Params) -> torch.optim.Optimizer:
    keys = {"use_muon": True, "rms_scale": False, "nesterov": True}
    rates = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    return importlib.import_module("muon_fsdp2").Muon([{"params": params, **keys, **rates}])


def _by_full_tensor(package: str) -> Builder:
    def build(params: Params) -> torch.optim.Optimizer:
        """Build dtensor-muon's or muonium's optimizer, which are of one author."""
        module: Any = importlib.import_module(f"{package}.orthogonalize.orthogonalize")
        module.ns_loop_triton = module.ns_loop
        keys = {"use_cautious_wd": False, "orthogonalization_strategy": "newton_schulz"}
        # dtensor-muon makes one matrix of a batch otherwise.
        groups = [{"params": params, "flatten": False, "momentum": MOMENTUM}]
        return importlib.import_module(package).Muon(groups, LR, WEIGHT_DECAY, **keys)

    return build


PEERS: Mapping[str, Builder] = {
    OURS: _ours("bf16"),
    OURS_FP32: _ours("fp32"),
    "AdamW": lambda params: torch.optim.AdamW(params, LR, weight_decay=WEIGHT_DECAY, foreach=True),
    "torch.optim.Muon": lambda params: torch.optim.Muon(params, LR, WEIGHT_DECAY, MOMENTUM),
    "dion": _dion,
    "muon-fsdp2": _muon_fsdp2,
    "dtensor-muon": _by_full_tensor("dtensor_muon"),
    "muonium": _by_full_tensor("muonium"),
}
