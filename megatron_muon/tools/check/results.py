# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Versions of packages, and steps compared with whole matrices."""

import os
import platform
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from emerging_optimizers.mixin import WeightDecayT
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_muon.fsdp2.muon import Muon
from megatron_muon.mcore.versions import installed_versions, version_problems
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import gather_objects
from megatron_muon.step.dependencies import environment_problems, missing_names
from megatron_muon.tools.check.verdicts import Finding

# Of an update in bf16, relative to its norm, if its input differs in the last bit: 5.8e-3
# (docs/numerics.md). Shards in place of whole matrices differ by about 1.
_MAX_DIFFERENCE = 0.05
_NUM_STEPS = 3
# Tall, square and wide; the third is uneven over two ranks, the last is empty on some of four.
_SHAPES = ((160, 96), (96, 96), (41, 130), (3, 24))


def check_versions() -> Finding:
    """Check that all ranks have the same packages, and list what changes NCCL.

    Communication: a gather of objects over the job.
    """
    versions = dict(installed_versions())
    has_megatron = versions["megatron-core"] is not None
    problems = version_problems(versions if has_megatron else versions | {"megatron-core": "0.19"})
    problems += missing_names() + environment_problems()
    if not has_megatron:
        versions["megatron-core"] = "none (FSDP2 does not need it)"
    backend = dist.get_backend()
    if backend == "nccl":
        backend += " " + ".".join(map(str, torch.cuda.nccl.version()))
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    text += f", Python {platform.python_version()}, CUDA {torch.version.cuda}, {backend}"
    # Before any rank returns: all ranks join.
    if len(set(gather_objects(text))) > 1:
        problems.append(f"{text}: expected the same packages on all ranks")
    if problems:
        return Finding("FAIL", f"{'; '.join(problems)} -> See docs/support.md, Versions")
    prefixes = ("NCCL_", "TORCH_NCCL_", "PYTORCH_", "CUDA_DEVICE_MAX")
    variables = [f", {name}={os.environ[name]}" for name in os.environ if name.startswith(prefixes)]
    return Finding("PASS", text + "".join(variables))


def check_step(device: torch.device, exchange: ExchangeSettings) -> Finding:
    """Step whole matrices by emerging-optimizers' Muon, and their shards by ``fsdp2.Muon``.

    Another release of emerging-optimizers may step differently.

    Args:
        device: Of this rank.
        exchange: With fp32 messages and one owner the documented bits are upstream's.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    shards: list[torch.nn.Parameter] = []
    wholes: list[torch.nn.Parameter] = []
    optimizers: list[torch.optim.Optimizer] = []
    for method in get_args(WeightDecayT):
        starts = [torch.randn(shape, generator=generator).to(device) for shape in _SHAPES]
        wholes += [torch.nn.Parameter(start.clone()) for start in starts]
        shards += [torch.nn.Parameter(distribute_tensor(s, mesh, [Shard(0)])) for s in starts]
        settings: dict[str, Any] = {
            "lr": 0.02,
            "momentum": 0.95,
            "weight_decay": 0.01,
            "nesterov": True,
            "scale_mode": "spectral",
            "weight_decay_method": method,
        }
        optimizers.append(Muon(shards[-len(starts) :], exchange=exchange, **settings))
        optimizers.append(WholeMatrixMuon(wholes[-len(starts) :], **settings))
    start = _joined(wholes)
    for _ in range(_NUM_STEPS):
        for whole, shard in zip(wholes, shards, strict=True):
            whole.grad = torch.randn(whole.shape, generator=generator).to(device)
            shard.grad = distribute_tensor(whole.grad.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    result = _joined([cast(DTensor, shard).full_tensor() for shard in shards])
    expected = _joined(wholes)
    if torch.equal(result, expected):
        return Finding("PASS", "equal bits")
    difference = float((result - expected).norm() / (expected - start).norm())
    text = f"differs by {difference:.1e} of the norm of all updates"
    # NaN compares as False, and fails below.
    if difference <= _MAX_DIFFERENCE:
        return Finding("PASS", text)
    return Finding("FAIL", f"{text}, expected {_MAX_DIFFERENCE} at most -> Report it")


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
