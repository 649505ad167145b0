# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train with accelerate's FSDP2, which shards after the optimizer has been built.

    torchrun --nproc-per-node 2 scripts/recipes/with_accelerate.py

``prepare()`` takes model and optimizer, shards the model, and puts the sharded parameters into the
optimizer's groups. ``save_state()`` and ``load_state()`` write and read both. On ranks without a
GPU Accelerator does not choose FSDP by itself: ``shard_on_cpu`` sets it.
"""

from pathlib import Path

import _model
import torch
from _accelerate_cpu import shard_on_cpu
from accelerate import Accelerator, FullyShardedDataParallelPlugin


def accelerator_of() -> Accelerator:
    """Return an Accelerator that shards with FSDP2, a layer at a time."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    shard_on_cpu(accelerator, plugin)
    return accelerator


def train(
    accelerator: Accelerator, name: str, folder: Path, first: int = 0, seed: int = 0
) -> list[float]:
    """Train from a step on, and return the losses; load before it, or save after ``SAVED_AT``."""
    model = _model.Decoder(seed)
    optimizer = _model.optimizer_of(model, name)
    scheduler = _model.scheduler_of(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    _model.check_is_sharded(model)
    if first:
        accelerator.load_state(str(folder))
    losses = []
    for step in range(first, _model.STEPS):
        loss = model(_model.batch_of(step, accelerator.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(_model.mean_over_ranks(loss))
        if step + 1 == _model.SAVED_AT and not first:
            accelerator.save_state(str(folder))
    accelerator.free_memory()
    return losses


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    options = _model.parser_of(__doc__).parse_args()
    accelerator = accelerator_of()
    losses = train(accelerator, options.optimizer, options.folder)
    resumed = train(accelerator, options.optimizer, options.folder, first=_model.SAVED_AT, seed=1)
    _model.report("accelerate", options.optimizer, losses, resumed)
    accelerator.end_training()


if __name__ == "__main__":
    main()
