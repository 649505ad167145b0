# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train layouts of xtuner with groups as it builds them, and nothing but torch.

    torchrun --nproc-per-node 2 scripts/recipes/with_xtuner_groups.py

xtuner's optimizer gets groups with ``algorithm`` for one object: matrices, fused query, key and
value, experts stacked by rows, and AdamW's. The vision part is sharded over a mesh of one axis, the
language part over one of two. ``num_experts`` and ``muon_split_sizes`` there are ``split_sizes``.
"""

from typing import Any

import torch
import torch.distributed as dist
from _model import DEVICE, VOCAB, WIDTH, fit, train_twice
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_muon.fsdp2 import MuonAdamW

NUM_EXPERTS = 4


class Language(nn.Module):
    """One layer with fused query, key and value, and dense experts in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.Linear(WIDTH, NUM_EXPERTS * WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Return logits of tokens and what vision has seen."""
        hidden = self.embedding(tokens) + image
        query, key, value = self.qkv(hidden).chunk(3, dim=2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended)
        weights = self.router(hidden).softmax(2).unsqueeze(3)
        outputs = self.experts(hidden).unflatten(2, (NUM_EXPERTS, WIDTH))
        return self.head(self.norm(hidden + (weights * outputs).sum(2)))


class VisionLanguage(nn.Module):
    """A vision part, whose image is the first token, and a language part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vision = nn.Sequential(
            nn.Linear(8, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False)
        )
        self.language = Language()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``(batch, length)`` tokens."""
        image = self.vision(nn.functional.one_hot(tokens[:, :1] % 8, 8).float())
        logits = self.language(tokens[:, :-1], image)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups by what a parameter is; each is a list of names and parameters."""
    named = dict(model.named_parameters())
    fused = {"language.qkv.weight": 3, "language.experts.weight": NUM_EXPERTS}
    elementwise = ("embedding", "head", "norm", "router")
    rest = [name for name in named if any(word in name for word in elementwise)]
    matrices = [name for name in named if name not in fused and name not in rest]
    return [
        {"params": [(name, named[name]) for name in matrices]},
        *({"params": [(name, named[name])], "split_sizes": n} for name, n in fused.items()),
        {"params": [(name, named[name]) for name in rest], "algorithm": "adamw"},
    ]


def train(options: Any, first: int, seed: int) -> list[float]:
    """Train from a step on, and return the losses."""
    model, num_ranks = VisionLanguage(seed).to(DEVICE), dist.get_world_size()
    fully_shard(model.vision, mesh=init_device_mesh(DEVICE, (num_ranks,)))
    axes = ("replicate", "shard")
    mesh = init_device_mesh(DEVICE, (1, num_ranks), mesh_dim_names=axes)
    fully_shard(model.language, mesh=mesh)
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw":
        # torch steps the parameters of one mesh at a time.
        parts = (model.vision, model.language)
        optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in parts], lr=1e-2)
    else:
        optimizer = MuonAdamW(groups_of(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
    return fit(options.folder, first, model, optimizer, scheduler)


if __name__ == "__main__":
    train_twice(f"torch {torch.__version__}", __doc__, train)
