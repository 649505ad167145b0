# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train with Lightning's ModelParallelStrategy: automatic optimization, clipping, a scheduler.

    torchrun --nproc-per-node 2 scripts/recipes/with_lightning.py

``configure_model()`` shards with FSDP2, then ``configure_optimizers()`` builds the optimizer from
sharded parameters. Automatic optimization takes one optimizer, whose ``step()`` gets a closure: the
forward and backward pass, and clipping. Distributed checkpoints are written and read by Lightning.
"""

import warnings
from pathlib import Path
from typing import Any

import _model
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Module(LightningModule):
    """The decoder, with what Lightning asks of it."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.model = _model.Decoder(seed)
        self.name = name
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Shard each layer, and what is left."""
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer of the sharded parameters, and a scheduler of it."""
        _model.check_is_sharded(self)
        optimizer = _model.optimizer_of(self, self.name)
        scheduler = _model.scheduler_of(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.model(batch)
        self.losses.append(_model.mean_over_ranks(loss))
        return loss


def train(options: Any, seed: int = 0, checkpoint: Path | None = None) -> list[float]:
    """Train for two epochs, and save after each; or go on from the first one."""
    samples = [_model.sample(index) for index in range(_model.BATCH * _model.SAVED_AT)]
    # Lightning adds a sampler by rank, and does not skip batches within an epoch.
    loader = torch.utils.data.DataLoader(samples, batch_size=_model.BATCH // 2, shuffle=False)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=_model.STEPS // _model.SAVED_AT,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(options.optimizer, seed)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module.losses


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    warnings.filterwarnings("ignore", message=".*num_workers.*")
    options = _model.parser_of(__doc__).parse_args()
    losses = train(options)
    resumed = train(options, seed=1, checkpoint=options.folder / "epoch=0.ckpt")
    _model.report("lightning", options.optimizer, losses, resumed)


if __name__ == "__main__":
    main()
