# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions of Megatron-Bridge that are wrapped, for its trainer and others that call them.

Bridge has a loop, a loader and a saver of its own. They call functions of megatron-core, which are
repaired there.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer
from megatron_muon.mcore.checkpoint_folders import find_checkpoint
from megatron_muon.mcore.checkpoint_load import Comparison, find_together, load_compared
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint, read_checkpoint
from megatron_muon.mcore.unsupported import UNSUPPORTED, Unsupported, raise_where_refused

_BRIDGE_UNSUPPORTED = tuple(
    Unsupported(
        f"checkpoint.{name}",
        name,
        "Bridge has a save of its own for it, which has not been run with Megatron-FSDP here",
        "drop it",
    )
    for name in ("async_save", "non_persistent_ckpt_type")
)


def compare_before_loading(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``load_fsdp_dtensor_checkpoint``, which ignores missing tensors.

    Weights are compared strictly with ``strict_fsdp_dtensor_load`` alone, which is off by default;
    optimizer state always, as its momentum would silently stay zero.

    Communication: see ``find_together()`` and ``rename_and_compare()``.
    """
    load = functools.partial(original, *args, **kwargs)
    call = _arguments(original, args, kwargs)
    if call["rank0"] or call["sharded_state_dict"] is None:
        return load()
    checkpoint = find_together(lambda: _locate(call))
    assert checkpoint is not None
    is_strict = getattr(call["ckpt_cfg"], "strict_fsdp_dtensor_load", False)
    comparison = Comparison(
        checkpoint,
        ("model", "optimizer") if is_strict else ("optimizer",),
        f"{checkpoint.folder} does not fit the optimizer or the model of this run. If only "
        "the optimizer differs, checkpoint.load_optim=False or checkpoint.finetune=True "
        "loads the weights and starts momentum at zero. Nothing was loaded.",
    )
    # Other trainers pass a model's configuration, or none.
    if scheduler := getattr(call["cfg"], "scheduler", None):
        name = "use_checkpoint_opt_param_scheduler"
        setattr(call["cfg"].optimizer, name, getattr(scheduler, name))
    return load_compared(load, call["sharded_state_dict"], comparison)


def _arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _locate(call: Mapping[str, Any]) -> StoredCheckpoint:
    """Read the checkpoint that ``load_fsdp_dtensor_checkpoint`` is about to load."""
    from megatron.bridge.training.checkpointing import get_checkpoint_name

    folder, release = call["checkpoint_path_override"], call["release"]
    path = Path(folder or get_checkpoint_name(call["load_dir"], call["iteration"], release))
    if folder is None and not release:
        path = find_checkpoint(path.parent, call["iteration"])
    return read_checkpoint(path)


def leave_stages_unaligned(
    original: Any, model: Any, model_config: Any, ddp_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap ``_update_model_config_funcs``: Megatron-FSDP cannot align stages.

    See ``alignment_problems()``. ``dist.align_grad_reduce`` is on by default.
    """
    if ddp_config.use_megatron_fsdp and model_config.pipeline_model_parallel_size > 1:
        kwargs["align_grad_reduce"] = False
    original(model, model_config, ddp_config, *args, **kwargs)


def check_before_training(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``train`` to refuse settings of checkpoints, and to give metrics their writers.

    An optimizer does not see settings of checkpoints when it is built.

    Raises:
        SettingsError: With all settings that cannot work.
    """
    call = _arguments(original, args, kwargs)
    optimizer, state = call["optimizer"], call["global_state"]
    if isinstance(optimizer, FSDPMuonChainedOptimizer):
        raise_where_refused(_settings(state.cfg), (*UNSUPPORTED, *_BRIDGE_UNSUPPORTED))
        if optimizer.metrics_log is not None:
            optimizer.metrics_log.bridge_state = state
    return original(*args, **kwargs)


def _settings(cfg: Any) -> Mapping[str, Any]:
    """Merge the settings of logs, checkpoints, model and optimizer into one table."""
    # Later releases keep the settings of layers inside of the model's.
    model = getattr(cfg.model, "transformer", cfg.model)
    parts = (cfg.logger, cfg.checkpoint, model, cfg.ddp, cfg.optimizer)
    return {name: value for part in parts for name, value in vars(part).items()}
