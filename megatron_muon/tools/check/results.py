# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Versions, and kernels and steps compared with torch's functions and with whole matrices."""

import os
import platform
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from emerging_optimizers.mixin import WeightDecayT
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_muon.fsdp2.muon import Muon
from megatron_muon.mcore.versions import installed_versions, version_problems
from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import gather_objects
from megatron_muon.runtime.row_moves import difference_from_torch
from megatron_muon.step.dependencies import environment_problems, missing_names
from megatron_muon.tools.check.verdicts import Finding

# Of an update in bf16, relative to its norm, if its input differs in the last bit: 5.8e-3
# (docs/numerics.md). Shards in place of whole matrices differ by about 1.
_MAX_DIFFERENCE = 0.05
# Relative difference of losses in fp32 over a few steps. CPU ranks differ by 5e-7 at most
# (docs/numerics.md); GPUs sum in other orders. A run without Newton-Schulz differs by more than
# 3e-5.
_MAX_LOSS_DIFFERENCE = 1e-5
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


def check_row_kernel(device: torch.device) -> Finding:
    """Compare the kernel that moves rows with torch, to the bit; this compiles it."""
    if device.type == "cpu":
        return Finding("SKIP", "CPU ranks move rows by torch")
    difference = difference_from_torch(device)
    if difference is None:
        return Finding("PASS", "equal bits")
    return Finding(
        "SLOW",
        f"{difference} -> Rows move by torch, with equal results. Triton needs a C compiler (gcc, "
        "clang, or CC) and Python.h (python3-dev)",
    )


def check_backend(name: str, device: torch.device) -> Finding:
    """Compare a backend of Newton-Schulz with emerging-optimizers' function, in bf16."""
    settings = NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (1.0, 1.0))
    backend = BACKENDS[name]
    if problems := backend.problems(settings, device):
        return Finding("SKIP", "; ".join(problems))
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).to(device)
    args = NewtonSchulzArgs(settings, (256, 512), is_normalized=True)
    result = backend.run((matrix / matrix.norm()).bfloat16()[None], args)[0].float()
    with fp32_matmul_precision("medium"):
        expected = muon_utils.newton_schulz(matrix, settings.steps, settings.coefficient_type)
    return _finding(result, expected, 0.0)


def check_step(device: torch.device) -> Finding:
    """Step whole matrices by emerging-optimizers' Muon, and their shards by ``fsdp2.Muon``.

    Messages are fp32, and matrices have one owner: the documented bits are upstream's. Another
    release of emerging-optimizers may step differently.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
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
    return _finding(result, _joined(wholes), start)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _finding(result: torch.Tensor, expected: torch.Tensor, start: torch.Tensor | float) -> Finding:
    """Judge a result by its difference, relative to the norm of the update.

    Args:
        result: Any shape.
        expected: Same shape.
        start: Same shape, the value before the updates; 0 for results that are none.
    """
    if torch.equal(result, expected):
        return Finding("PASS", "equal bits")
    difference = float((result - expected).norm() / (expected - start).norm())
    text = f"differs by {difference:.1e} of the norm"
    # NaN compares as False, and fails below.
    if difference <= _MAX_DIFFERENCE:
        return Finding("PASS", text)
    return Finding("FAIL", f"{text}, expected {_MAX_DIFFERENCE} at most -> Report it")


def check_megatron_step() -> Finding:
    """Train a small GPT under Megatron-FSDP and under DDP, each by Muon, and compare losses."""
    if not torch.cuda.is_available():
        return Finding("SKIP", "Megatron-LM needs a GPU")
    try:
        from megatron_muon.tools.check.parity import train_small_gpt
    except ImportError as error:
        return Finding("SKIP", f"megatron-core: {error}")
    losses, expected = (
        train_small_gpt(is_sharded=is_sharded, num_steps=2 * _NUM_STEPS)
        for is_sharded in (True, False)
    )
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    text = f"losses {expected[0]:.4f} to {expected[-1]:.4f}, differ by {difference:.1e} from DDP's"
    if difference <= _MAX_LOSS_DIFFERENCE:
        return Finding("PASS", text)
    return Finding("FAIL", f"{text}, expected {_MAX_LOSS_DIFFERENCE} at most -> Report it")
