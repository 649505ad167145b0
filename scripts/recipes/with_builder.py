# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train with the optimizer that a trainer builds from a configuration, sharded by ``fully_shard``.

    torchrun --nproc-per-node 2 scripts/recipes/with_builder.py --trainer verl

The whole trainers need GPUs and other services. Here they build the optimizer and save it: verl by
its checkpoint manager, AutoModel and torchtitan by their states for torch's checkpoints. Of NeMo-RL
there is no release: the class is found and called as its DTensor worker does.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import _model
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

PACKAGES = {
    "verl": "verl",
    "automodel": "nemo-automodel",
    "nemo-rl": "hydra-core",
    "torchtitan": "torchtitan",
}
# Module and name of the optimizer.
MUON, ADAMW = ("megatron_muon.fsdp2", "from_parameters"), ("torch.optim", "AdamW")


def of_verl(model: torch.nn.Module, name: tuple[str, str]) -> Any:
    """Build by ``optimizer_impl`` and ``optimizer``."""
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    config = FSDPOptimizerConfig(optimizer_impl=name[0], optimizer=name[1], lr=1e-2)
    return build_optimizer(model.parameters(), config)


def of_automodel(model: torch.nn.Module, name: tuple[str, str]) -> Any:
    """Build by ``_target_``."""
    from nemo_automodel.components.optim.optimizer import build_optimizer

    (optimizer,) = build_optimizer(model, (".".join(name), {"lr": 1e-2}))
    return optimizer


def of_nemo_rl(model: torch.nn.Module, name: tuple[str, str]) -> Any:
    """Build by ``optimizer.name``, with the arguments of the examples."""
    from hydra.utils import get_class

    kwargs = {"lr": 1e-2, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
    trained = (param for param in model.parameters() if param.requires_grad)
    return get_class(".".join(name))(trained, **kwargs, foreach=False, fused=False)


def of_torchtitan(model: torch.nn.Module, name: tuple[str, str]) -> Any:
    """Build by a subclass of its container, which knows its own optimizers alone."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    from megatron_muon.fsdp2 import from_parameters

    class Container(OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
            resolve = OptimizersContainer._resolve_optimizer_factory
            return from_parameters if name == "from_parameters" else resolve(name)

    group = ParamGroupConfig(pattern=".*", optimizer_name=name[1], optimizer_kwargs={"lr": 1e-2})
    config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    return Container(config, model_parts=[model])


BUILDERS = {
    "verl": of_verl,
    "automodel": of_automodel,
    "nemo-rl": of_nemo_rl,
    "torchtitan": of_torchtitan,
}


def store(options: argparse.Namespace, model: Any, optimizer: Any, *, is_load: bool) -> None:
    """Save, or load, in the way of the trainer."""
    if options.trainer == "verl":
        from transformers import PretrainedConfig
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        # It saves the configuration too, which the small model lacks.
        model.config, model.can_generate = PretrainedConfig(), lambda: False
        manager = FSDPCheckpointManager(model, optimizer)
        (manager.load_checkpoint if is_load else manager.save_checkpoint)(str(options.folder))
        return
    if options.trainer == "automodel":
        from nemo_automodel.components.checkpoint.stateful_wrappers import (
            ModelState,
            OptimizerState,
        )

        states = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}
    elif options.trainer == "torchtitan":
        from torchtitan.components.checkpoint import ModelWrapper

        states = {"model": ModelWrapper(model), "optimizer": optimizer}
    else:
        weights, moments = get_state_dict(model, optimizer)
        states = {"model": weights, "optimizer": moments}
    (dcp.load if is_load else dcp.save)(states, checkpoint_id=options.folder)
    if is_load and options.trainer == "nemo-rl":
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def train(options: argparse.Namespace, first: int = 0, seed: int = 0) -> list[float]:
    """Train from a step on, and return the losses; load before it, or save after ``SAVED_AT``."""
    model = _model.Decoder(seed).to(_model.DEVICE)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = BUILDERS[options.trainer](model, MUON if options.optimizer == "muon" else ADAMW)
    if first:
        store(options, model, optimizer, is_load=True)
    losses = []
    for step in range(first, _model.STEPS):
        loss = model(_model.batch_of(step, _model.DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_model.mean_over_ranks(loss))
        if step + 1 == _model.SAVED_AT and not first:
            store(options, model, optimizer, is_load=False)
    return losses


def main() -> None:
    """Train, and train the last steps again from the checkpoint."""
    parser = _model.parser_of(__doc__)
    parser.add_argument("--trainer", choices=PACKAGES, required=True)
    options = parser.parse_args()
    if _model.DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if _model.DEVICE == "cuda" else "gloo")
    losses = train(options)
    resumed = train(options, first=_model.SAVED_AT, seed=1)
    _model.report(PACKAGES[options.trainer], options.optimizer, losses, resumed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
