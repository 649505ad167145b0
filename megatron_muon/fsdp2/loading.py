# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a state that is loaded must not change, and what it must bring."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.fsdp2 import main_params
from megatron_muon.fsdp2.parameters import named_parameters
from megatron_muon.runtime.dtensor_layout import local_tensor

# Of a parameter group: they decide the plan, so those of construction stay. A group without them
# gets none: a checkpoint of torch.optim.Muon has no such keys.
PLANNED = {"split_sizes": None, "transposed": False, "flatten": False}


def planned_keys(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the plan was made for, by group."""
    return [{key: group[key] for key in PLANNED if key in group} for group in groups]


def keep_planned(groups: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> None:
    """Put back what the plan was made for; warn where the checkpoint has something else."""
    for number, (group, planned) in enumerate(zip(groups, own, strict=True)):
        for key, default in PLANNED.items():
            loaded, kept = group.pop(key, default), planned.get(key, default)
            if _as_tuple(loaded) != _as_tuple(kept):
                warnings.warn(
                    f"group {number}: the checkpoint has {key} {loaded}, this run {kept}, which it "
                    "keeps.",
                    stacklevel=3,
                )
        group.update(planned)


def keep_dtypes(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[torch.Tensor, dict[str, Any]],
    state_dict: Mapping[str, Any],
    momentum_dtype: torch.dtype,
) -> None:
    """Take momentum and float32 copies again: torch loads them in the parameter's dtype.

    Args:
        groups: All groups of an optimizer that has loaded the state.
        state: Of the optimizer.
        state_dict: What was loaded.
        momentum_dtype: Of momentum.
    """
    ids = [each for group in state_dict["param_groups"] for each in group["params"]]
    params = [param for group in groups for param in group["params"]]
    for number, param in zip(ids, params, strict=False):
        saved, loaded = state_dict["state"].get(number, {}), state.get(param, {})
        for key, dtype in (("momentum_buffer", momentum_dtype), (main_params.KEY, torch.float32)):
            if key in loaded and key in saved and loaded[key].dtype != dtype:
                loaded[key] = saved[key].to(device=loaded[key].device, dtype=dtype)


def momentum_problems(
    groups: Sequence[Mapping[str, Any]], state: Mapping[torch.Tensor, Mapping[str, Any]]
) -> list[str]:
    """List the parameters without momentum, or with one that is sharded otherwise."""
    problems = []
    for each in named_parameters(groups):
        loaded = state.get(each.param, {}).get("momentum_buffer")
        expected = _sharding(each.param)
        got = "nothing" if loaded is None else _sharding(loaded)
        if got != expected:
            problems.append(
                f"{each.name}: expected momentum of {expected}, got {got}. Load through "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
    return problems


def _sharding(tensor: torch.Tensor) -> str:
    """Describe how a tensor is sharded."""
    text = f"local shape {tuple(local_tensor(tensor).shape)}"
    return f"{text}, {tensor.placements}" if isinstance(tensor, DTensor) else text


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - whatever a checkpoint holds
    """Return lists as tuples: a checkpoint may have made one of the other."""
    return tuple(value) if isinstance(value, list) else value
