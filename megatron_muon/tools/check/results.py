# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Kernels and steps on this machine, compared with torch's functions and with whole matrices."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_muon.fsdp2.muon import Muon
from megatron_muon.fsdp2.muon_adamw import MuonAdamW
from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import Backend, NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.row_moves import difference_from_torch
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


def check_row_kernel(device: torch.device) -> Finding:
    """Compare the kernel that moves rows with torch, to the bit."""
    if device.type == "cpu":
        return Finding("SKIP", "CPU ranks move rows by torch")
    difference = difference_from_torch(device)
    if difference is None:
        return Finding("PASS", "equal bits")
    return Finding("SLOW", difference, "Rows move by torch, with equal results: report it")


def check_backend(name: str, device: torch.device) -> Finding:
    """Compare a backend of Newton-Schulz with its reference on tall, wide and square stacks."""
    settings = NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (1.0, 1.0))
    backend = BACKENDS[name]
    if problems := backend.problems(settings, device):
        return Finding("SKIP", "; ".join(problems))
    if backend.reference is None:
        return _check_beside_upstream(backend, settings, device)
    for shape in ((512, 256), (256, 1024), (256, 256)):
        stack = torch.empty(2, *shape, dtype=torch.bfloat16, device=device)
        backend.check(stack, NewtonSchulzArgs(settings, shape, is_normalized=True))
    return Finding("PASS", f"within rounding of {backend.reference.name}")


def _check_beside_upstream(
    backend: Backend, settings: NewtonSchulzSettings, device: torch.device
) -> Finding:
    """Compare with emerging-optimizers' function, on a float32 matrix."""
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).to(device)
    args = NewtonSchulzArgs(settings, (256, 512), is_normalized=False)
    with fp32_matmul_precision("medium"):
        result = backend.run(matrix[None], args)[0]
        expected = muon_utils.newton_schulz(matrix, settings.steps, settings.coefficient_type)
    # An orthogonal matrix has 1; five steps leave singular values between about 0.7 and 1.2.
    largest = float(torch.linalg.matrix_norm(result.double(), 2))
    return _finding(result, expected, 0.0, f"largest singular value {largest:.2f}")


def check_fsdp2_step(kind: type[Muon] | type[MuonAdamW], device: torch.device) -> Finding:
    """Step sharded matrices, and compare with emerging-optimizers' Muon on the whole ones.

    Messages are fp32, and matrices have one owner: the documented bits are upstream's.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    num_matrices = len(_SHAPES)
    shapes = [*_SHAPES, (50, 64)] if kind is MuonAdamW else list(_SHAPES)
    starts = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    wholes = [torch.nn.Parameter(start.clone()) for start in starts]
    shards = [torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])) for start in starts]
    settings: dict[str, Any] = {
        "lr": 0.02,
        "momentum": 0.95,
        "weight_decay": 0.01,
        "nesterov": True,
        "scale_mode": "spectral",
    }
    groups: list[dict[str, Any]] = [
        {"params": shards[:num_matrices]},
        {"params": shards[num_matrices:], "algorithm": "adamw"},
    ]
    exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
    optimizers = [
        kind(groups if kind is MuonAdamW else groups[:1], exchange=exchange, **settings),
        WholeMatrixMuon(wholes[:num_matrices], **settings),
    ]
    if kind is MuonAdamW:
        optimizers.append(torch.optim.AdamW(wholes[num_matrices:], lr=0.02, weight_decay=0.01))
    for _ in range(_NUM_STEPS):
        for whole, shard in zip(wholes, shards, strict=True):
            whole.grad = torch.randn(whole.shape, generator=generator).to(device)
            shard.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    text = f"{len(shapes)} parameters, {_NUM_STEPS} steps"
    return _finding(_joined(shards), _joined(wholes), _joined(starts), text)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of whole tensors, or of gathered shards, end to end."""
    wholes = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([whole.detach().flatten() for whole in wholes])


def _finding(
    result: torch.Tensor, expected: torch.Tensor, start: torch.Tensor | float, text: str
) -> Finding:
    """Judge a result by its difference, relative to the norm of the update.

    Args:
        result: Any shape.
        expected: Same shape.
        start: Same shape, the value before the updates; 0 for results that are none.
        text: What was compared.
    """
    if torch.equal(result, expected):
        return Finding("PASS", f"equal bits, {text}")
    difference = float((result - expected).norm() / (expected - start).norm())
    text = f"differs by {difference:.1e} of the norm, {text}"
    # NaN compares as False, and fails below.
    if difference <= _MAX_DIFFERENCE:
        return Finding("PASS", text)
    return Finding("FAIL", text, f"Expected {_MAX_DIFFERENCE} at most: report it")


def check_megatron_step() -> Finding:
    """Train a small GPT under Megatron-FSDP and under DDP, each by Muon, and compare losses."""
    if not torch.cuda.is_available():
        return Finding("SKIP", "Megatron-LM needs a GPU")
    try:
        from megatron_muon.tools.check.parity import train_small_gpt
    except ImportError as error:
        return Finding("SKIP", f"megatron-core: {error}")
    losses = functools.partial(train_small_gpt, num_steps=2 * _NUM_STEPS)
    return _compare_losses(losses(is_sharded=True), losses(is_sharded=False))


def _compare_losses(losses: Sequence[float], expected: Sequence[float]) -> Finding:
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    text = f"losses {expected[0]:.4f} to {expected[-1]:.4f}, differ by {difference:.1e} from DDP's"
    if difference <= _MAX_LOSS_DIFFERENCE:
        return Finding("PASS", text)
    return Finding("FAIL", text, f"Expected {_MAX_LOSS_DIFFERENCE} at most: report it")
