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
from _model import (
    DEVICE,
    SAVED_AT,
    STEPS,
    Decoder,
    batch_of,
    check_is_sharded,
    end_ranks,
    load,
    mean_over_ranks,
    parser_of,
    report,
    save,
    start_ranks,
    version_of,
)
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


def train(options: Any, first: int = 0, seed: int = 0) -> list[float]:
    """Train from a step on, and return the losses; load before it, or save after ``SAVED_AT``."""
    model = Decoder(seed).to(DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    check_is_sharded(model)
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
    if first:
        loaded = load(options.folder, model, optimizer, scheduler=scheduler.state_dict())
        scheduler.load_state_dict(loaded["scheduler"])
    losses = []
    for step in range(first, STEPS):
        loss = model(batch_of(step, DEVICE))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1)
        losses.append(mean_over_ranks(loss))
        if step + 1 == SAVED_AT and not first:
            save(options.folder, model, optimizer, scheduler=scheduler.state_dict())
    return losses


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    # The YAML names this module, which runs as __main__.
    sys.modules["with_automodel"] = sys.modules["__main__"]
    options = parser_of(__doc__).parse_args()
    start_ranks()
    losses = train(options)
    resumed = train(options, first=SAVED_AT, seed=1)
    report(f"nemo-automodel {VERSION}, {options.optimizer}", losses, resumed)
    end_ranks()


if __name__ == "__main__":
    main()
