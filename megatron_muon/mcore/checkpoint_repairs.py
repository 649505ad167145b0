# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of ``fsdp_dtensor`` checkpoints in megatron-core 0.19.2, and one for later releases.

Without them Muon's state cannot be saved if layers are gated (SwiGLU), nor any state if weights are
fp32 or unsharded; and Adam's save hangs if a rank holds an empty shard.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.fsdp_dtensor_checkpoint import expert_param_local_key
from megatron.core.utils import get_model_config
from torch.distributed.tensor import DTensor

from megatron_muon.mcore.checkpoint_state import agree_on_step, initialize_state, layer_names
from megatron_muon.mcore.fsdp_model import (
    bare_name,
    is_wrapped,
    sharded_module,
    sharded_parameters,
)
from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v2, own_rows
from megatron_muon.runtime.tensors import as_shard

_IS_REPLICATED = "_megatron_muon_is_replicated"


def split_every_state(
    original: Any,
    model: Any,
    model_state_dict: dict[str, Any],
    optimizer_state_dict: dict[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Wrap a handler that splits weights and Adam's states, so that it splits all states.

    ``handle_swiglu_in_state_dict`` splits a gated ``linear_fc1`` into its halves ``_w`` and ``_v``,
    so that tensor-parallel ranks can reshard it. ``handle_mla_down_proj_in_state_dict`` of later
    releases splits the fused down-projection of latent attention into its two matrices. Both read
    the rows of this rank from an attribute. Without a buffer of model weights (fp32, ``no_shard``)
    the attribute is missing; under HFSDP it describes another buffer than the one with main weights
    and optimizer state. So it is set anew, from the latter.

    """
    # Other trainers pass one chunk.
    located = model if isinstance(model, JoinedChunks) else JoinedChunks([model])
    weights, _ = original(located, model_state_dict, None)
    if optimizer_state_dict is None:
        return weights, None
    split_names = {bare_name(name) for name in model_state_dict.keys() - weights.keys()}
    num_experts = get_model_config(model).num_moe_experts
    whole = optimizer_state_dict["state"]
    local_names = {expert_param_local_key(name, num_experts): name for name in whole}
    split: dict[str, dict[str, Any]] = {}
    for local, name in local_names.items():
        states = whole[name]
        if bare_name(local) not in split_names:
            split[name] = states
            continue
        kinds = [kind for kind, value in states.items() if isinstance(value, DTensor)]
        # State of whole matrices is on their owners.
        if not kinds:
            split[name] = states
        others = {kind: value for kind, value in states.items() if kind not in kinds}
        # The original splits one tensor per name, so it is called once per kind of state.
        for kind in kinds:
            for part, tensor in original(located, {local: states[kind]}, None)[0].items():
                split.setdefault(part.replace(local, name), dict(others))[kind] = tensor
    return weights, {**optimizer_state_dict, "state": split}


class JoinedChunks:
    """The model chunks of a rank as one Megatron-FSDP model, with the names of checkpoints.

    Its parameters have the element range that this rank holds. Upstream's lookup expects the
    wrapper of bf16 models, and finds nothing in fp32; and its functions know one chunk.

    Args:
        chunks: Megatron-FSDP models.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._first = chunks[0]
        self._parameters: dict[str, Any] = {}
        self._modules: list[tuple[str, torch.nn.Module]] = []
        for chunk in chunks:
            # Other trainers pass the module inside of the wrapper.
            model = sharded_module(chunk) if is_wrapped(chunk) else chunk
            names = layer_names(model)
            parameters = sharded_parameters(model)
            self._parameters |= {names(name): param for name, param in parameters.items()}
            self._modules += [(names(name), module) for name, module in model.named_modules()]
            if buffers := getattr(model, "param_and_grad_buffer", None):
                strategy = buffers.ddp_config.data_parallel_sharding_strategy
                setattr(buffers.dist_index, _IS_REPLICATED, strategy == "no_shard")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the first chunk, such as the configuration that all share."""
        return getattr(self._first, name)

    def named_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return the modules of all chunks; the original asks for them in every call."""
        return self._modules

    def get_parameter(self, name: str) -> DTensor:
        """Return a parameter by its name, with or without the prefixes of wrappers."""
        param = self._parameters[bare_name(name)]
        row_size = param._local_tensor.shape[1:].numel()
        start, stop = own_rows(param)
        param.megatron_fsdp_slice = slice(start * row_size, stop * row_size)
        if is_of_fsdp_v2(param):
            param.megatron_fsdp_dist_index = _MeshOfV2(param)
        return param


class _MeshOfV2:
    """Adapter that gives a v2 parameter the mesh lookups that upstream expects from v1."""

    tp_dim = None

    def __init__(self, param: DTensor) -> None:
        self._param = param

    def get_submesh(self, *_: Any, **__: Any) -> Any:
        """Return a tensor-parallel mesh of one rank: the parameter is sharded by v2 alone."""
        return SimpleNamespace(mesh=torch.zeros(1))

    def dtensor(self, local: torch.Tensor, shape: torch.Size) -> DTensor:
        """Return the shard of a slice of the parameter, with unchanged placements."""
        return as_shard(local, self._param.device_mesh, self._param.placements, shape)


def keep_replicas_whole(
    original: Any, local_tensor: torch.Tensor, param: torch.Tensor, dist_index: Any, **kwargs: Any
) -> DTensor:
    """Wrap ``make_fsdp_dtensor`` of checkpoints: it assumes that all tensors are sharded.

    It checks shards by collectives for each tensor. What the checkpoint needs of them is gathered
    for all tensors together later (chunk_offsets.py).
    """
    if isinstance(dist_index, _MeshOfV2):
        return dist_index.dtensor(local_tensor, param.shape)
    if getattr(dist_index, _IS_REPLICATED, False):
        kwargs["is_sharded_param"] = False
    kwargs |= {"run_check": False, "update_uneven_dtensor_chunk_meta": False}
    return original(local_tensor, param, dist_index=dist_index, **kwargs)


def complete_adam_state(original: Any, self: Any, is_loading: bool = False) -> dict[str, Any]:
    """Wrap ``DistributedOptimizer.sharded_param_state_fsdp_dtensor`` for all variants of Adam.

    Upstream's optimizer has no state for empty shards, so ranks save different sets of tensors, and
    hang. For loading, upstream creates state by a step with zero gradients, and so decays the
    weights of a run without a checkpoint.

    Communication: see ``agree_on_step()``.
    """
    if "Adam" not in type(self.optimizer).__name__:
        return original(self, is_loading)
    initialize_state(self)
    agree_on_step(self)
    return original(self, False)
