# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Names of layers across pipeline stages: a stage counts its own from 0, a checkpoint all of them.

Otherwise layers of two stages have one name, and a save keeps those of an arbitrary one.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict
from megatron.core.utils import get_model_config

_LAYER = re.compile(r"^((?:module\.)*)(.*?\blayers)\.(\d+)(?=\.|$)")


class LayerNames:
    """Rename the layers of a model chunk to their position in the whole model.

    Args:
        chunk: A model chunk. Without pipeline stages all names stay.
    """

    def __init__(self, chunk: Any) -> None:
        self._positions: dict[tuple[str, str], int] = {}
        has_stages = getattr(chunk.config, "pipeline_model_parallel_size", 1) > 1
        for name, module in chunk.named_modules() if has_stages else ():
            found = _LAYER.fullmatch(name)
            number = getattr(module, "layer_number", None)
            # Layers of multi-token prediction are those of one stage, and count from 0.
            if found and number is not None and "mtp" not in name:
                self._positions[found[2], found[3]] = number - 1

    def __call__(self, name: str) -> str:
        """Return the name of a parameter or module in the whole model."""
        found = _LAYER.match(name)
        position = self._positions.get((found[2], found[3])) if found else None
        if found is None or position is None:
            return name
        return f"{found[1]}{found[2]}.{position}{name[found.end() :]}"


def rename_layers(chunk: torch.nn.Module, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary by parameter name with the names of the whole model."""
    names = LayerNames(chunk)
    return {names(name): value for name, value in by_name.items()}


def name_across_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer._param_name``, whose layers are counted by stage and chunk.

    Several chunks with layers are an error upstream, and states of two stages have one name.
    """

    @functools.wraps(original)
    def _param_name(self: Any, param: torch.Tensor) -> str:
        """Return the name of a parameter in the whole model."""
        if not hasattr(self, "param_to_name"):
            num_experts = get_model_config(self.model_chunks[0]).num_moe_experts
            # Otherwise as the original does.
            self.param_to_name = {
                param: name
                for chunk in self.model_chunks
                for name, param in handle_experts_in_state_dict(
                    rename_layers(chunk, dict(chunk.named_parameters())), num_experts
                ).items()
            }
        return original(self, param)

    return _param_name


def with_stored_generator(state_dict: dict[str, Any], stored: Iterable[str]) -> dict[str, Any]:
    """Return a state dict to load whose state of random generators is one of the checkpoint's.

    There is one per stage and tensor-parallel rank. A run with more stages loads that of another
    stage, and upstream warns.

    Args:
        state_dict: Not changed.
        stored: Keys of the checkpoint.
    """
    found = {match[1] for key in stored if (match := re.match(r"rng_state\.(\([^)]*\))", key))}
    own = state_dict.get("rng_state")
    if not found or not isinstance(own, Mapping) or own.keys() <= found:
        return state_dict
    return {**state_dict, "rng_state": dict(zip(sorted(found), own.values(), strict=False))}


def names_of_stages(names: Iterable[str]) -> set[str]:
    """Return the names that any stage of this rank's pipeline has.

    Communication: one gather of objects over the pipeline.
    """
    group = mpu.get_pipeline_model_parallel_group()
    gathered: list[set[str]] = [set()] * group.size()
    dist.all_gather_object(gathered, set(names), group=group)
    return set().union(*gathered)
