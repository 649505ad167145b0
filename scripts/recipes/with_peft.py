# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train LoRA's adapters with Muon: frozen weights and adapters are sharded by ``fully_shard``.

    torchrun --nproc-per-node 2 scripts/recipes/with_peft.py

``from_model`` leaves adapters to AdamW, unless their modules have ``use_muon``.
"""

import argparse
import os

import _model
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def train(options: argparse.Namespace, first: int = 0, seed: int = 0) -> list[float]:
    """Train from a step on, and return the losses; load before it, or save after ``SAVED_AT``."""
    model = _model.Decoder(seed)
    config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["head"])
    inject_adapter_in_model(config, model)
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith(("lora_A", "lora_B")):
            module.use_muon = True
    model.to(_model.DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    _model.check_is_sharded(model)
    optimizer = _model.optimizer_of(model, options.optimizer, lr=5e-2)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=options.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    losses = []
    for step in range(first, _model.STEPS):
        loss = model(_model.batch_of(step, _model.DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_model.mean_over_ranks(loss))
        if step + 1 == _model.SAVED_AT and not first:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=options.folder)
    return losses


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    options = _model.parser_of(__doc__).parse_args()
    if _model.DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if _model.DEVICE == "cuda" else "gloo")
    losses = train(options)
    resumed = train(options, first=_model.SAVED_AT, seed=1)
    _model.report("peft", options.optimizer, losses, resumed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
