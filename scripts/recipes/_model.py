# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A small decoder, its data and optimizer, and the comparison of a resumed run, for all recipes.

A recipe trains ``STEPS`` steps and saves after ``SAVED_AT`` of them, in the way of its trainer.
Then it builds everything anew with other weights, loads, and trains the last steps again: their
losses must have the bits of the first run.
"""

import argparse
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu_ranks import end_process

STEPS, SAVED_AT = 8, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, WIDTH, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 8


class Layer(nn.Module):
    """A layer of a decoder; query, key and value have a matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``(batch, length, WIDTH)`` of ``(batch, length, WIDTH)``."""
        normed = self.attention_norm(hidden)
        query, key, value = (
            linear(normed).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.mlp_norm(hidden))))


class Decoder(nn.Module):
    """Predict the next of the numbers of a sequence."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``(batch, length)`` tokens."""
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sample(index: int) -> torch.Tensor:
    """Return ``(LENGTH,)`` tokens, which count in steps of one to four from anywhere."""
    drawn = torch.Generator().manual_seed(index)
    start, stride = torch.randint(VOCAB, (2,), generator=drawn).tolist()
    return (start + (1 + stride % 4) * torch.arange(LENGTH)) % VOCAB


def batch_of(step: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return this rank's rows of the batch of a step."""
    rows = range(dist.get_rank(), BATCH, dist.get_world_size())
    return torch.stack([sample(BATCH * step + row) for row in rows]).to(device)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of the ranks' losses.

    Communication: one all-reduce of 4 bytes over all ranks.
    """
    mean = loss.detach().float().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``optimizer``, one of muon and adamw, and of ``folder``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizer", choices=("muon", "adamw"), default="muon", help="adamw: that of torch"
    )
    # All ranks of a torchrun have the same port.
    name = f"recipe-{os.environ.get('MASTER_PORT', os.getpid())}"
    default = Path(tempfile.gettempdir()) / name
    parser.add_argument("--folder", type=Path, default=default, help="of the checkpoint")
    return parser


def optimizer_of(model: nn.Module, name: str, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Return Muon for the matrices of a model and AdamW for the rest, or torch's AdamW."""
    # Only now: a recipe may have to let CPU ranks stand in for GPUs first.
    from megatron_muon.fsdp2 import MuonAdamW

    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return MuonAdamW.from_model(model, lr=lr)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a learning rate that decays with every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))


def check_is_sharded(model: nn.Module) -> None:
    """Check that all parameters are sharded, so that a recipe shows what it claims."""
    plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert not plain, f"expected DTensors, got plain tensors: {plain}"


def report(package: str, optimizer: str, losses: Sequence[float], resumed: Sequence[float]) -> None:
    """Print the result on rank 0, and exit with 1 if the resumed run has other losses.

    On the CPU the process ends here: threads of gloo could abort it while the interpreter ends.

    Args:
        package: Library of the trainer.
        optimizer: Name of the optimizer.
        losses: Of all steps of the run that never stopped.
        resumed: Of the last steps, of the run that loaded.
    """
    expected = list(losses[SAVED_AT:])
    is_equal = list(resumed) == expected
    if dist.get_rank() == 0:
        title = f"{package} {importlib.metadata.version(package)}, {optimizer}"
        print(f"{title}: losses {' '.join(f'{loss:.4f}' for loss in losses)}")
        word = "equal" if is_equal else f"{list(resumed)}, expected {expected}"
        print(f"{title}: losses after loading: {word}", flush=True)
    is_good = is_equal and len(losses) == STEPS and losses[-1] < 0.95 * losses[0]
    if DEVICE == "cpu":
        end_process(int(not is_good))
    if not is_good:
        sys.exit(1)
