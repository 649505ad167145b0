# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The optimizers that ``fsdp2_step.py`` compares, over parameters sharded by ``fully_shard``."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.95, 0.1
OURS, OURS_FP32 = "megatron_muon", "megatron_muon, fp32 messages"
# Modules of the peers that may not be installed.
PACKAGES = {
    "dion": "dion",
    "DistMuon": "torchtitan.distributed.flex_shard.dist_muon",
    "VeOmni": "veomni.optim.muon",
    "xtuner": "xtuner.v1.optim.muon",
    "muon-fsdp2": "muon_fsdp2",
    "dtensor-muon": "dtensor_muon",
    "muonium": "muonium",
}

Params = list[torch.nn.Parameter]
Builder = Callable[[Params], torch.optim.Optimizer]


def _ours(comm_dtype: Any) -> Builder:
    def build(params: Params) -> torch.optim.Optimizer:
        """Build this package's optimizer, with torch's coefficients and scale."""
        from megatron_muon.fsdp2 import ExchangeSettings, Muon

        exchange = ExchangeSettings(comm_dtype=comm_dtype)
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


def _dist_muon(params: Params) -> torch.optim.Optimizer:
    """Build torchtitan's: whole matrices on one rank each, experts where they are, one bucket.

    It refuses other devices than CUDA in one check.
    """
    module: Any = importlib.import_module(PACKAGES["DistMuon"])
    reshard: Any = importlib.import_module("torchtitan.distributed.flex_shard")
    from torch.distributed.tensor import Shard

    if params[0].device.type == "cpu":
        device = params[0].device
        module.DistMuon._validate_parameter_storage = lambda self: device
        # Nothing is asynchronous there: torch has streams that do nothing.
        torch.cpu.Stream = _Stream  # type: ignore[misc]
    names = [str(number) for number, _ in enumerate(params)]
    layouts = {
        name: reshard.ComputeLayout(
            shardings_by_mesh_axis={"shard": Shard(0) if param.ndim == 3 else reshard.Owned()}
        )
        for name, param in zip(names, params, strict=True)
    }
    return reshard.build_dist_muon(
        [{"params": params, "param_names": names}],
        compute_sharding_by_fqn=layouts,
        bucket_configs=[reshard.BucketConfig(patterns=("*",), name="all")],
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        nesterov=True,
    )


class _Stream(torch.cpu.Stream):
    """torch's stream of a CPU, which takes no device."""

    def __init__(self, device: object = None, priority: int = -1) -> None:
        super().__init__(priority)


def _veomni(params: Params) -> torch.optim.Optimizer:
    """Build VeOmni's without the kernels that need a GPU."""
    muon = importlib.import_module(PACKAGES["VeOmni"]).DistributedMuon
    return muon(params, LR, WEIGHT_DECAY, MOMENTUM, nesterov=True, ns_implementation="std")


def _xtuner(params: Params) -> torch.optim.Optimizer:
    """Build xtuner's; its default strategy aborts in gloo's reduce-scatter."""
    groups: dict[int, Params] = {}
    for param in params:
        groups.setdefault(param.shape[0] if param.ndim == 3 else 1, []).append(param)
    return importlib.import_module(PACKAGES["xtuner"]).Muon(
        [{"params": group, "num_experts": number} for number, group in groups.items()],
        lr=LR,
        mu=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        nesterov=True,
        adjust_lr="spectral_norm",
        remainder_strategy="pad_all2all",
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
    "DistMuon": _dist_muon,
    "VeOmni": _veomni,
    "xtuner": _xtuner,
    "muon-fsdp2": _muon_fsdp2,
    "dtensor-muon": _by_full_tensor("dtensor_muon"),
    "muonium": _by_full_tensor("muonium"),
}


def installed_version(package: str) -> str | None:
    """Return the version of a peer, "found" for a copied folder, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        # A folder that was copied.
        return "found" if is_there(PACKAGES[package]) else None


def is_there(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that has it
        return False
