# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train with the standalone Megatron-FSDP: ``fully_shard_model`` and ``fully_shard_optimizer``.

    torchrun --nproc-per-node 2 scripts/recipes/with_megatron_fsdp.py

``fully_shard_optimizer()`` makes a step of zero gradients, which creates the state, and decays the
weights once unless the learning rate is 0 for it. The optimizer's ``state_dict()`` then says which
rows its tensors are, so that torch.distributed.checkpoint saves and loads them. Megatron-FSDP needs
GPUs: without one, ``scripts/cpu_ranks`` lets it run on gloo ranks, for which
megatron-core has to be installed too.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import _model
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _model import DEVICE
from torch.distributed.device_mesh import init_device_mesh

if DEVICE == "cpu":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import cpu_ranks
    from cpu_ranks import megatron_core

    cpu_ranks.enable()
    buffers = importlib.import_module("megatron_fsdp.param_and_grad_buffer")
    buffers.gradient_reduce_preprocessing = megatron_core.preprocessing_without_premul_from(
        buffers.gradient_reduce_preprocessing
    )

from megatron_fsdp import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)


def build(name: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("fsdp", "tp"))
    model = fully_shard_model(
        _model.Decoder(seed).to(DEVICE),
        device_mesh=mesh,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[_model.Layer],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    optimizer = fully_shard_optimizer(_model.optimizer_of(model, name, lr=0.0))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a checkpoint has."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def train(options: Any, first: int = 0, seed: int = 0) -> list[float]:
    """Train from a step on, and return the losses; load before it, or save after ``SAVED_AT``."""
    model, optimizer = build(options.optimizer, seed)
    _model.check_is_sharded(model)
    if first:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=options.folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for step in range(first, _model.STEPS):
        loss = model(_model.batch_of(step, DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_model.mean_over_ranks(loss))
        if step + 1 == _model.SAVED_AT and not first:
            dcp.save(state_of(model, optimizer), checkpoint_id=options.folder)
    return losses


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    options = _model.parser_of(__doc__).parse_args()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    losses = train(options)
    resumed = train(options, first=_model.SAVED_AT, seed=1)
    _model.report("megatron-fsdp", options.optimizer, losses, resumed)
    dist.destroy_process_group()
    if DEVICE == "cpu":
        cpu_ranks.end_process(0)


if __name__ == "__main__":
    main()
