# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The optimizers that are compared, each over the same matrices of the same model.

Every peer has a ``step`` that starts from reduced gradients and ends with updated parameters where
it keeps them: on row shards, except ``layer_wise``, which keeps whole parameters on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.plan.layout import rows_in_buffer
from megatron_muon.tools.plan.simulation import unit_buffer

MUON = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True}


@dataclass(frozen=True)
class Model:
    """Matrices of a dense transformer, sharded as Megatron-FSDP shards them.

    Args:
        shapes: Of all matrices, in order.
        rows_of_ranks: Rows of a matrix by rank, without ranks that hold none.
        device: Where they live.
        mesh: One axis, all ranks.
    """

    shapes: list[tuple[int, int]]
    rows_of_ranks: list[dict[int, tuple[int, int]]]
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def build(cls, num_layers: int, hidden: int, device: torch.device) -> "Model":
        """Make attention and a feed-forward four times as wide, layer by layer."""
        layer = [(hidden, hidden), (3 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
        ranks = [(rank,) for rank in range(dist.get_world_size())]
        size, begins = unit_buffer(tuple(layer), len(ranks))
        rows = [
            rows_in_buffer(ranks, size, begin, *shape)
            for begin, shape in zip(begins, layer, strict=True)
        ]
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        return cls(layer * num_layers, rows * num_layers, device, mesh)

    def whole(self, index: int, seed: int) -> torch.Tensor:
        """Draw a whole matrix, the same on every rank."""
        generator = torch.Generator().manual_seed(seed + index)
        return torch.randn(self.shapes[index], generator=generator).to(self.device)

    def rows(self, index: int) -> slice:
        """Return the rows of a matrix that this rank holds."""
        return slice(*self.rows_of_ranks[index].get(dist.get_rank(), (0, 0)))

    def shards(self, seed: int) -> list[torch.Tensor]:
        """Draw this rank's shard of every matrix."""
        return [self.whole(i, seed)[self.rows(i)].clone() for i in range(len(self.shapes))]

    def gathered(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """Assemble a matrix on every rank; shards are padded to the size of the largest one."""
        by_rank = [self.rows_of_ranks[index].get(rank, (0, 0)) for rank in range(self.mesh.size())]
        sizes = [stop - start for start, stop in by_rank]
        padded = local.new_empty(max(sizes), local.shape[1])
        padded[: len(local)] = local
        shards = local.new_empty(len(sizes), *padded.shape)
        dist.all_gather_into_tensor(shards.flatten(0, 1), padded, group=self.mesh.get_group())
        return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])

    def dtensor(self, index: int, local: torch.Tensor) -> DTensor:
        """Wrap a shard as Megatron-FSDP does."""
        rows, cols = self.shapes[index]
        return DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=(rows, cols), stride=(cols, 1)
        )


@dataclass(frozen=True)
class Peer:
    """One optimizer, ready to step.

    Args:
        step: Does a step; gradients are there.
        newton_schulz: Modules and names of the functions whose time is Newton-Schulz.
        has_whole_parameters: Whether every rank has whole parameters after the step; the others
            are gathered by Megatron-FSDP in the next forward pass.
    """

    step: Callable[[], Any]
    newton_schulz: Sequence[tuple[Any, str]] = ()
    has_whole_parameters: bool = False


def adam(model: Model, precision: str) -> Peer:
    """Fused AdamW of torch on the shards: the time that Muon should come near."""
    params = [torch.nn.Parameter(shard) for shard in model.shards(0)]
    for param, grad in zip(params, model.shards(1000), strict=True):
        param.grad = grad
    optimizer = torch.optim.AdamW([p for p in params if p.numel()], fused=True)
    return Peer(optimizer.step)


def sharded_muon(model: Model, precision: str, **exchange: Any) -> Peer:
    """This package's optimizer."""
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, build_muon_step
    from megatron_muon.plan.settings import ExchangeSettings
    from megatron_muon.rows.parameters import PlannedParameter

    params = [
        torch.nn.Parameter(model.dtensor(i, shard)) for i, shard in enumerate(model.shards(0))
    ]
    parts = {}
    for index, (param, rows) in enumerate(zip(params, model.rows_of_ranks, strict=True)):
        boxes = {rank: (held, (0, param.shape[1])) for rank, held in rows.items()}
        parts[param] = PlannedParameter(f"matrix {index}", param, param, known_boxes=boxes)
    for index, (param, grad) in enumerate(zip(params, model.shards(1000), strict=True)):
        param.grad = model.dtensor(index, grad) if grad.numel() else None
    muon = FSDPZeROTensorParallelMuon(
        params, tensor_shards=parts, fp32_matmul_prec=precision, **MUON
    )
    muon_step = build_muon_step([muon], ExchangeSettings(**exchange))
    return Peer(muon_step.step, [(backend, "run") for backend in BACKENDS.values()])


def all_gather(model: Model, precision: str) -> Peer:
    """Every rank gathers the momentum of every matrix in fp32, and orthogonalizes all of them."""
    from emerging_optimizers.orthogonalized_optimizers import Muon, muon_utils

    optimizer = Muon([torch.nn.Parameter(model.whole(0, 0))], fp32_matmul_prec=precision, **MUON)
    weights, grads = model.shards(0), model.shards(1000)
    momentum = [torch.zeros_like(shard) for shard in weights]

    def step() -> None:
        """Average the local rows, gather each matrix, and keep the local rows of its result."""
        torch._foreach_mul_(weights, 1 - MUON["lr"] * MUON["weight_decay"])
        torch._foreach_lerp_(momentum, grads, 1 - MUON["momentum"])
        updates = torch._foreach_lerp(grads, momentum, MUON["momentum"])
        for index, update in enumerate(updates):
            whole = model.gathered(index, update)
            result = optimizer.orthogonalize(optimizer.param_groups[0]["params"][0], whole)
            weights[index].add_(result[model.rows(index)], alpha=-MUON["lr"])

    return Peer(torch.no_grad()(step), [(muon_utils, "newton_schulz")])


def layer_wise(model: Model, precision: str) -> Peer:
    """Upstream's: whole parameters and gradients on every rank, whole matrices assigned.

    ``--optimizer muon --use-distributed-optimizer`` without Megatron-FSDP. The step ends with the
    all-gather of fp32 parameters, which Megatron-FSDP does in the forward pass.
    """
    from megatron.core.optimizer import emerging_optimizers
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    params = [torch.nn.Parameter(model.whole(i, 0)) for i in range(len(model.shapes))]
    for index, param in enumerate(params):
        param.grad = param.main_grad = model.whole(index, 1000)
    config = OptimizerConfig(optimizer="muon", lr=MUON["lr"])
    muon = emerging_optimizers.TensorParallelMuon(params, fp32_matmul_prec=precision, **MUON)
    groups = SimpleNamespace(dp_cp=model.mesh.get_group(), expt_dp=dist.new_group([dist.get_rank()],
                             use_local_synchronization=True))  # fmt: skip
    wrapped = FP32Optimizer(muon, config, emerging_optimizers._eopt_init_state_fn)
    optimizer = LayerWiseDistributedOptimizer([wrapped], config, groups)

    def step() -> None:
        """Step what this rank owns, then gather all."""
        muon.step()
        optimizer.allgather_params()

    return Peer(step, [(emerging_optimizers, "newton_schulz_tp")], has_whole_parameters=True)


PEERS: dict[str, Callable[[Model, str], Peer]] = {
    "adam": adam,
    "owner": sharded_muon,
    "owner, fp32 messages": lambda m, p: sharded_muon(m, p, comm_dtype="fp32"),
    "all_gather": all_gather,
    "layer_wise": layer_wise,
}
