# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of FSDP2 parameters that ``fsdp2_step.py`` compares, with the same settings.

No peer is tuned. A peer that expects GPUs gets what it lacks on CPU ranks.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.95, 0.1
OURS, OURS_FP32 = "megatron_muon", "megatron_muon, fp32 messages"
OURS_STACKED = "megatron_muon, stacks as on GPUs"
# Modules of the peers that may not be installed.
PACKAGES = {
    "dion": "dion",
    "DistMuon": "torchtitan.distributed.flex_shard.dist_muon",
    "Shampoo, ROUND_ROBIN": "distributed_shampoo",
    "Shampoo, REPLICATE": "distributed_shampoo",
}
Params = list[torch.nn.Parameter]
Builder = Callable[[Params], torch.optim.Optimizer]


def _ours(comm_dtype: Any, cost_model: str = "") -> Builder:
    def build(params: Params) -> torch.optim.Optimizer:
        """Build this package's optimizer, with torch's coefficients and scale."""
        from megatron_muon.fsdp2 import ExchangeSettings, Muon

        exchange = ExchangeSettings(comm_dtype=comm_dtype, cost_model=cost_model)
        keys: Any = {"coefficient_type": "simple", "scale_mode": "shape_scaling", "nesterov": True}
        return Muon(params, LR, MOMENTUM, WEIGHT_DECAY, exchange=exchange, **keys)

    return build


def _dion(params: Params) -> torch.optim.Optimizer:
    """Build dion's Muon over the axis that shards, as its documentation asks for."""
    first: Any = params[0]
    mesh = first.device_mesh
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


def _our_soap(params: Params) -> torch.optim.Optimizer:
    """Build this package's optimizer with emerging-optimizers' SOAP."""
    from megatron_muon.fsdp2 import Muon

    return Muon(params, LR, weight_decay=WEIGHT_DECAY, optimizer_class="soap")


def _shampoo(strategy: str) -> Builder:
    def build(params: Params) -> torch.optim.Optimizer:
        """Build SOAP of Shampoo over whole matrices, as its documentation asks for."""
        shampoo: Any = importlib.import_module("distributed_shampoo")
        if params[0].device.type == "cpu":
            dist.all_to_all = _all_to_all
        first: Any = params[0]
        if first.device_mesh.ndim > 1:
            # Ranks make the groups of its hybrid distributor in different orders.
            raise NotImplementedError("its hybrid distributor waits for ever over gloo")
        assigned = getattr(shampoo.FSDPParamAssignmentStrategy, strategy)
        return shampoo.DistributedShampoo(
            params,
            LR,
            betas=(0.9, 0.95),
            epsilon=1e-8,
            weight_decay=WEIGHT_DECAY,
            max_preconditioner_dim=8192,
            precondition_frequency=1,
            preconditioner_config=shampoo.DefaultSOAPConfig,
            # Matrices, rather than vectors of all their elements, where these are few.
            distributed_config=shampoo.FullyShardDistributedConfig(
                param_assignment_strategy=assigned, target_parameter_dimensionality=2
            ),
        )

    return build


def _all_to_all(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Exchange tensors of any sizes; gloo's collective of lists takes equal sizes alone."""
    sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
    received = torch.empty(sum(sizes[0]), dtype=inputs[0].dtype)
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    torch._foreach_copy_(outputs, received.split(sizes[0]))


def _adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, LR, weight_decay=WEIGHT_DECAY, foreach=True)


SOAP_PEERS: Mapping[str, Builder] = {
    OURS: _our_soap,
    "AdamW": _adamw,
    "Shampoo, ROUND_ROBIN": _shampoo("ROUND_ROBIN"),
    "Shampoo, REPLICATE": _shampoo("REPLICATE"),
}
PEERS: Mapping[str, Builder] = {
    OURS: _ours("bf16"),
    OURS_FP32: _ours("fp32"),
    OURS_STACKED: _ours("bf16", "stack_tiles=1024"),
    "AdamW": _adamw,
    "torch.optim.Muon": lambda params: torch.optim.Muon(params, LR, WEIGHT_DECAY, MOMENTUM),
    "dion": _dion,
    "DistMuon": _dist_muon,
}


def is_there(peer: str) -> bool:
    """Return whether the module of a peer is installed."""
    if peer not in PACKAGES:
        return True
    try:
        return importlib.util.find_spec(PACKAGES[peer]) is not None
    except ModuleNotFoundError:  # not even the package that has it
        return False
