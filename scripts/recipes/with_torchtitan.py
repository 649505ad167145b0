# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train torchtitan's Llama 3 with a config from outside of torchtitan.

    torchrun --nproc-per-node 2 scripts/recipes/with_torchtitan.py --folder titan_output
    torchrun --nproc-per-node 2 scripts/recipes/with_torchtitan.py --folder titan_output --resume

torchtitan builds optimizers by names that ``OptimizersContainer`` lists. ``Optimizers`` adds one.
``muon`` and ``adamw`` are config functions, which torchtitan's own command finds by
``--module with_torchtitan --config muon`` if this folder is on ``PYTHONPATH``. Trainer, clipping,
schedule and checkpoints are torchtitan's. It expects GPUs: ``_torchtitan_cpu.py`` lists what it
needs on ranks without one. Two calls, as torchtitan builds one trainer in a process.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from _model import (
    BATCH,
    LENGTH,
    SAVED_AT,
    STEPS,
    check_is_sharded,
    parser_of,
    report,
    version_of,
)

VERSION = version_of("torchtitan")

from _torchtitan_cpu import IS_GPU, for_cpu  # noqa: E402
from _torchtitan_data import Loader, NoTokenizer  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)
from torchtitan.config import ConfigManager, TrainingConfig  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from megatron_muon.fsdp2 import MuonAdamW  # noqa: E402


class Optimizers(OptimizersContainer):
    """torchtitan's container, which also knows MuonAdamW."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Groups of parameters, by patterns of their names."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "MuonAdamW":
            return MuonAdamW
        return OptimizersContainer._resolve_optimizer_factory(name)


def _config(optimizer: OptimizersContainer.Config) -> Trainer.Config:
    spec = for_cpu(model_registry("debugmodel"))
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        model_spec=spec,
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH // 2,
            seq_len=LENGTH - 1,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=not IS_GPU,
        ),
        dataloader=Loader.Config(),
        tokenizer=NoTokenizer.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=SAVED_AT, last_save_model_only=False
        ),
    )


def muon() -> Trainer.Config:
    """Muon for matrices of layers, AdamW for all else, in one optimizer."""
    rest = {"algorithm": "adamw", "lr": 1e-3, "betas": (0.9, 0.95)}
    names = "tok_embeddings|lm_head|norm"
    groups = [
        ParamGroupConfig(pattern=names, optimizer_name="MuonAdamW", optimizer_kwargs=rest),
        ParamGroupConfig(pattern=".*", optimizer_name="MuonAdamW", optimizer_kwargs={"lr": 1e-3}),
    ]
    return _config(Optimizers.Config(param_groups=groups, implementation="foreach"))


def adamw() -> Trainer.Config:
    """AdamW of torch, as torchtitan configures it."""
    return _config(default_adamw(lr=1e-3))


def train(options: Any, *flags: str) -> list[float]:
    """Run torchtitan's trainer with a config of this module, and return the losses it logs."""
    config = ["--module", "with_torchtitan", "--config", options.optimizer]
    folder = ["--dump-folder", str(options.folder)]
    trainer = ConfigManager().parse_args([*config, *folder, *flags]).build()
    losses, log = [], trainer.metrics_processor.log

    def note(step: int, loss: float, *rest: Any, **kwargs: Any) -> None:
        losses.append(loss)
        log(step, loss, *rest, **kwargs)

    trainer.metrics_processor.log = note
    for part in trainer.model_parts:
        check_is_sharded(part)
    trainer.train()
    trainer.close()
    return losses


def main() -> None:
    """Train; or with --resume train the last steps again from the checkpoint of that run."""
    parser = parser_of(__doc__)
    parser.add_argument("--resume", action="store_true", help="load, and compare the losses")
    options = parser.parse_args()
    written = options.folder / "losses.json"
    if options.resume:
        resumed = train(options, "--checkpoint.load-step", str(SAVED_AT), "--debug.seed", "1")
        losses = json.loads(written.read_text())
        report(f"torchtitan {VERSION}, {options.optimizer}", losses, resumed)
    else:
        losses = train(options)
        if torch.distributed.get_rank() == 0:
            written.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
