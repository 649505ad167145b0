# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Build MuonAdamW by the configuration of NeMo AutoModel; the training loop is this script's.

    torchrun --nproc-per-node 2 scripts/recipes/with_automodel.py

AutoModel's recipes read the optimizer from YAML. A class of optimizers as ``_target_`` gets
parameters without names there, so that Muon would get embeddings too. ``MuonAdamWConfig`` gets the
model. AutoModel's own recipes need GPUs: only ``build_optimizer`` and the scheduler run here.
"""

import dataclasses
import sys
from typing import Any

import torch
import yaml
from _model import DEVICE, Decoder, fit, train_twice, version_of
from torch.distributed.fsdp import fully_shard

VERSION = version_of("nemo-automodel")

from nemo_automodel.components.optim import (  # noqa: E402
    OptimizerConfig,
    OptimizerParamScheduler,
    build_optimizer,
)

from megatron_muon.fsdp2 import MuonAdamW  # noqa: E402

# In a file of its own, `optimizer:` of a recipe.
YAML = {
    "muon": "{_target_: with_automodel.MuonAdamWConfig, lr: 0.01, weight_decay: 0.01}",
    "adamw": "{_target_: torch.optim.AdamW, lr: 0.01, weight_decay: 0.01}",
}


@dataclasses.dataclass
class MuonAdamWConfig(OptimizerConfig):
    """Muon for matrices and AdamW for all else, one optimizer for each part of the model."""

    lr: float = 1e-3
    weight_decay: float = 0.01
    momentum: float = 0.95

    def build(
        self, model: torch.nn.Module, *, device_mesh: Any = None, is_peft: bool = False
    ) -> list[torch.optim.Optimizer]:
        """Return an optimizer for each part."""
        parts = getattr(model, "parts", [model])
        return [MuonAdamW.from_model(part, **self._constructor_kwargs()) for part in parts]


def train(options: Any, first: int, seed: int) -> list[float]:
    """Train from a step on, and return the losses."""
    model = Decoder(seed).to(DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    fields = yaml.safe_load(YAML[options.optimizer])
    (optimizer,) = build_optimizer(model, (fields.pop("_target_"), fields))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.005,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return fit(options.folder, first, model, optimizer, scheduler, increment=(1,))


if __name__ == "__main__":
    # The YAML names this module, which runs as __main__.
    sys.modules["with_automodel"] = sys.modules["__main__"]
    train_twice(f"nemo-automodel {VERSION}", __doc__, train)
