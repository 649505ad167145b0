# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer state by parameter name, as checkpoints of Megatron-FSDP hold it.

=======================  =======================================================================
``state``                parameter name -> state name -> tensor; DTensors sharded as the parameter
``param_to_group_meta``  parameter name -> settings of its parameter group
=======================  =======================================================================

Names are global: experts have their index in the model, and so have layers, though a pipeline stage
counts from 0. A copy of the embedding on another stage has the embedding's name. Upstream's
``DistributedOptimizer`` writes the same layout, so its tools can read it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    get_ep_layer_offset,
    handle_experts_in_state_dict,
)
from megatron.core.utils import get_model_config, log_single_rank

from megatron_muon.mcore.fsdp_model import bare_name, current_device, is_copy, is_v2
from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.tensors import local_tensor

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"((?:module\.)*)(.*?\blayers\.)(\d+)(?=\.|$)")
_GROUPED_BIAS = re.compile(r"(?<=\.experts\.linear_fc[12]\.bias)\d+")
# Settings of a parameter group that training changes; the others come from flags.
_MOVING_SETTINGS = ("lr", "weight_decay", "step")


def layer_names(chunk: Any) -> Callable[[str], str]:
    """Return a function from local names of parameters and modules to global ones.

    Upstream numbers experts itself, except for biases of grouped layers, which are numbered here.

    Args:
        chunk: A model chunk. Without pipeline stages and experts all names stay.
    """
    first_expert = get_ep_layer_offset(getattr(chunk.config, "num_moe_experts", None))
    copies = {bare_name(name) for name, param in chunk.named_parameters() if is_copy(param)}
    numbers: dict[str, int] = {}
    has_stages = getattr(chunk.config, "pipeline_model_parallel_size", 1) > 1
    for name, module in chunk.named_modules() if has_stages else ():
        number = getattr(module, "layer_number", None)
        # Layers of multi-token prediction are on one stage, and count from 0.
        if number is not None and _LAYER.fullmatch(name) and "mtp" not in name:
            numbers[bare_name(name)] = number - 1

    def number_in_model(layer: re.Match[str]) -> str:
        """Return the name of a layer, with its number in the whole model."""
        return f"{layer[1]}{layer[2]}{numbers.get(layer[2] + layer[3], layer[3])}"

    def rename(name: str) -> str:
        """Return the global name of a parameter or module."""
        if bare_name(name) in copies:
            # For token prediction a stage has it under this name already.
            name = name.replace("output_layer", "embedding.word_embeddings")
        name = _LAYER.sub(number_in_model, name, count=1)
        return _GROUPED_BIAS.sub(lambda number: str(int(number[0]) + first_expert), name)

    return rename


def rename_layers(chunk: torch.nn.Module, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary by parameter name with global names."""
    rename = layer_names(chunk)
    return {rename(name): value for name, value in by_name.items()}


def names_in_checkpoints(model_chunks: Sequence[Any]) -> dict[torch.Tensor, str]:
    """Return the names of parameters in checkpoints, the same for v1 and v2.

    Layers and experts have their numbers in the whole model.
    """
    num_experts = get_model_config(model_chunks[0]).num_moe_experts
    # One wrapper is between a chunk of v2 and its model, where v1 has two.
    prefix = "module." if is_v2(model_chunks[0]) else ""
    return {
        param: prefix + name
        for chunk in model_chunks
        for name, param in handle_experts_in_state_dict(
            rename_layers(chunk, dict(chunk.named_parameters())), num_experts
        ).items()
    }


def name_across_stages(original: Any, self: Any, param: torch.Tensor) -> str:
    """Wrap ``DistributedOptimizer._param_name``: it counts layers by stage and chunk.

    Several chunks with layers are an error upstream, and states of two stages have one name.
    """
    if not hasattr(self, "param_to_name"):
        self.param_to_name = names_in_checkpoints(self.model_chunks)
    return original(self, param)


def initialize_state(child: MegatronOptimizer) -> None:
    """Create all state of an optimizer, for every parameter on every rank, empty shards included.

    Saving runs one collective per tensor, and hangs if ranks hold different sets of tensors;
    loading fills existing tensors. Torch's Adam creates no state for empty shards, Megatron's
    initializer creates it without ``step``, and fused Adams keep ``step`` in groups, from the first
    step on.
    """
    # Megatron's initializer, for the names and dtypes of its checkpoints.
    child.init_state_fn(child.optimizer, child.config)
    if isinstance(child.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        for state in child.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
    elif type(child.optimizer).__name__ == "FusedAdam":
        for group in child.optimizer.param_groups:
            group.setdefault("step", 0)


def agree_on_step(child: MegatronOptimizer) -> None:
    """Set the step counters of empty shards, which Adam skips, to the value of other ranks.

    A checkpoint keeps the counter of an arbitrary rank.

    Args:
        child: Optimizer that exists on every rank, and steps all its parameters together.

    Communication: one all-reduce of a float64 over all ranks.
    """
    steps = [states.get("step") for states in child.optimizer.state.values()]
    counters = [step for step in steps if isinstance(step, torch.Tensor)]
    highest = max(map(float, counters), default=0.0)
    agreed = torch.tensor(highest, dtype=torch.float64, device=current_device())
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    for step in counters:
        step.fill_(agreed.item())


class OptimizerState:
    """State and settings of the optimizers of a model by parameter name.

    All state exists, for every parameter on every rank, once this is constructed: ranks that hold
    different sets of state hang a save.

    Args:
        children: Optimizers.
        model_chunks: The model, which still holds its DTensor parameters.

    Attributes:
        names: Names of parameters in checkpoints.
    """

    def __init__(self, children: Sequence[MegatronOptimizer], model_chunks: Sequence[Any]) -> None:
        self._children, self.names = children, names_in_checkpoints(model_chunks)
        for child in children:
            initialize_state(child)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
        """Yield state, group and parameter."""
        for child in self._children:
            for group in child.optimizer.param_groups:
                for param in group["params"]:
                    yield child.optimizer.state[param], group, param

    def pack(self) -> dict[str, dict[str, Any]]:
        """Return ``state`` and ``param_to_group_meta``.

        Tensors are shared with the optimizers, dictionaries are copies.

        Communication: see ``agree_on_step()``, for every optimizer.
        """
        for child in self._children:
            agree_on_step(child)
        state, settings = {}, {}
        for states, group, param in self._parameters():
            state[self.names[param]] = dict(states)
            settings[self.names[param]] = {k: v for k, v in group.items() if k != "params"}
        return {"state": state, "param_to_group_meta": settings}

    @torch.no_grad()
    def unpack(self, state_dict: Mapping[str, Any], *, loads_schedule: bool) -> None:
        """Fill the optimizers from a state dict with the layout of ``pack()`` on this rank.

        Tensors are copied into the existing ones, unless they are the same: the tensors of
        ``pack()``, which ``torch.distributed.checkpoint`` loads in place. Only group settings that
        change in training are loaded. The others come from the flags of this run; a warning names
        differences.

        Args:
            state_dict: ``state`` and ``param_to_group_meta``; not changed.
            loads_schedule: Whether ``max_lr`` and ``min_lr`` are loaded, too.

        Raises:
            RuntimeError: On all ranks, naming rank and key, if a parameter or one of its states is
                missing, unknown, or has another shape on any of them. Nothing was loaded.

        Communication: one all-reduce of a single int32 over all ranks of the job.
        """
        self._raise_where_it_does_not_fit(state_dict)
        loaded = (*_MOVING_SETTINGS, *(("max_lr", "min_lr") if loads_schedule else ()))
        overridden: dict[str, str] = {}
        for states, group, param in self._parameters():
            name = self.names[param]
            for key, value in state_dict["state"][name].items():
                if not isinstance(value, torch.Tensor):
                    states[key] = value
                elif value is not states[key]:
                    local_tensor(states[key]).copy_(local_tensor(value))
            stored = state_dict["param_to_group_meta"][name]
            # A group has one value: its first parameter's.
            if param is group["params"][0]:
                group.update({key: stored[key] for key in loaded if key in stored})
            for key, value in stored.items():
                if group.get(key, value) != value:
                    overridden[key] = f"{key} {group[key]} (checkpoint: {value}, for {name})"
        if overridden:
            log_single_rank(
                logger,
                logging.WARNING,
                "optimizer settings of this run differ from the checkpoint's and hold: %s",
                "; ".join(overridden.values()),
            )

    def _raise_where_it_does_not_fit(self, state_dict: Mapping[str, Any]) -> None:
        # Before anything is copied: training would silently continue from half a loaded state.
        expected = {self.names[param]: states for states, _, param in self._parameters()}
        layouts = [
            {
                f"state.{name}.{kind}": _describe(value)
                for name in expected
                for kind, value in by_name.get(name, {}).items()
            }
            for by_name in (expected, state_dict.get("state", {}))
        ]
        lacking = expected.keys() - state_dict.get("param_to_group_meta", {}).keys()
        raise_where_any_rank_fails(
            [
                *describe_differences(*layouts),
                *(
                    f"param_to_group_meta.{n}: expected group settings, got nothing"
                    for n in lacking
                ),
            ],
            None,
            current_device(),
            "Load the state of the same optimizer and model, resharded by torch.distributed."
            "checkpoint if the ranks differ. Nothing was loaded.",
        )


def describe_differences(expected: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    """Describe tensors that differ between two states, one sentence each.

    Args:
        expected: Shapes or layouts of tensors by name.
        actual: Shapes or layouts of the other state.
    """
    return [
        f"{key}: expected {expected.get(key, 'nothing')}, got {actual.get(key, 'nothing')}"
        for key in sorted(expected.keys() | actual.keys())
        if expected.get(key) != actual.get(key)
    ]


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if not isinstance(value, torch.Tensor):
        return kind
    return f"{kind} of shape {tuple(value.shape)}, here {tuple(local_tensor(value).shape)}"
