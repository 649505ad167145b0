# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""QK-clip on row shards: scale query and key rows down if attention logits are too large.

Upstream clips whole weights after the step. Under Megatron-FSDP that is too late: the weights are
installed by then, and the main weights overwrite them at the next step. So main weights are clipped
between the step and the installation.
"""

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_muon.mcore.fsdp_model import is_wrapped, sharded_module, sharded_parameters
from megatron_muon.mcore.unsupported import FSDP_UNSUPPORTED, raise_where_refused
from megatron_muon.rows.megatron_fsdp import own_rows, tensor_shard_shape

# Layers of an attention module that upstream's clip_qk clips.
_CLIPPED = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
_MAX_LOGIT = "_megatron_muon_max_attention_logit"


def clip_before_install(original: Any, self: Any) -> None:
    """Wrap ``_copy_main_params_to_model_params`` of an optimizer to clip main weights first.

    It follows a step of Adam, one optimizer for all parameters; ``FSDPMuonChainedOptimizer`` clips
    by itself. A second call in a step finds no logits.
    """
    if self.ddp_config.use_megatron_fsdp and not self.is_stub_optimizer:
        for chunk in self.model_chunks:
            clip_row_shards(sharded_module(chunk))
    original(self)


@torch.no_grad()
def clip_row_shards(fsdp_module: Any) -> None:
    """Clip the main weights of a Megatron-FSDP model, with ``qk_clip`` in its configuration.

    Attention records maximum logits since the last call. They are reset.

    Args:
        fsdp_module: The ``sharded_module()`` of a chunk, whose main weights have been stepped.

    Raises:
        SettingsError: Upstream's clip fails for the configuration.
        RuntimeError: Attention records no logits.

    Communication: see ``_reduced()``; clipping itself is local.
    """
    # Megatron-FSDP's own, as the model inside may be a module without one.
    config: Any = getattr(fsdp_module, "config", None)
    if not getattr(config, "qk_clip", False):
        return
    # Command lines were checked before; a script would fail at the first large logit.
    raise_where_refused(vars(config), FSDP_UNSUPPORTED)
    largest = getattr(fsdp_module, _MAX_LOGIT, 0.0)
    params = sharded_parameters(fsdp_module)
    for name, attention, logit in _reduced(fsdp_module):
        largest = max(largest, logit)
        # Upstream reads from the device in every layer; here the host has read all layers at once.
        if logit > config.qk_clip_threshold:
            _clip(name, attention, params)
    setattr(fsdp_module, _MAX_LOGIT, largest)


@torch.no_grad()
def max_attention_logit(original: Any, model: Sequence[Any], log_max_only: bool = False) -> float:
    """Wrap ``clip_qk``, which the training loop calls after every step.

    For a model that Megatron-FSDP wraps it returns the largest attention logit since the last call,
    at least 0.

    Communication: with ``log_max_only``, where nothing was clipped, see ``_reduced()``.
    """
    if not is_wrapped(model[0]):
        return original(model, log_max_only)
    largest = 0.0
    for module in map(sharded_module, model):
        logits = [logit for *_, logit in _reduced(module)] if log_max_only else []
        largest = max(largest, getattr(module, _MAX_LOGIT, 0.0), *logits)
        setattr(module, _MAX_LOGIT, 0.0)
    return largest


def _reduced(fsdp_module: Any) -> Iterator[tuple[str, Any, float]]:
    """Yield name, module and largest logit of the decoder's attentions that have logits.

    An attention has the logits of all data-parallel ranks while it is yielded, and none then.

    Communication: one all-reduce of 4 bytes per head of all layers over dp_cp, instead of
        upstream's one per layer; and one read by the host.
    """
    cores = {}
    for index, layer in enumerate(get_attr_wrapped_model(fsdp_module.module, "decoder").layers):
        attention: Any = getattr(layer, "self_attention", None)
        if not hasattr(attention, "clip_qk"):
            continue
        name, core = f"decoder.layers.{index}.self_attention", attention.core_attention
        if not hasattr(core, "current_max_attn_logits"):
            raise RuntimeError(
                f"{name}: expected attention that records its largest logits, got "
                f"{type(core).__name__}. Use --transformer-impl transformer_engine with "
                "Transformer Engine 2.9 or later, or drop --qk-clip and --log-max-attention-logit."
            )
        if core.current_max_attn_logits is not None:
            cores[name] = attention, core
    if not cores:
        return
    logits = [core.current_max_attn_logits.float() for _, core in cores.values()]
    flat = torch.cat(logits)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    by_layer = flat.split([heads.numel() for heads in logits])
    largest = torch.stack([heads.max() for heads in by_layer]).tolist()
    for (name, (attention, core)), heads, most in zip(
        cores.items(), by_layer, largest, strict=True
    ):
        core.current_max_attn_logits = heads
        yield name, attention, most
        core.current_max_attn_logits = None


def _clip(name: str, attention: Any, params: dict[str, Any]) -> None:
    """Multiply this rank's rows of the main weights by upstream's factors.

    Upstream's own method clips a column of ones: all elements of a row have the same factor.
    """
    device = attention.core_attention.current_max_attn_logits.device
    clone = copy.copy(attention)
    for child in (child for child in _CLIPPED if hasattr(attention, child)):
        weight = params[f"{name}.{child}.weight"]
        shape = tensor_shard_shape(weight)[0], 1
        column = torch.ones(shape, dtype=torch.float32, device=device)
        # It hides the layer of the module, which the clone shares with the original.
        clone.__dict__[child] = SimpleNamespace(weight=column)
    # Upstream divides the sizes of all tensor-parallel ranks by the query groups of one.
    clone.query_projection_size //= clone.world_size
    clone.kv_projection_size //= clone.world_size
    clone.clip_qk()
    for child in (child for child in _CLIPPED if child in clone.__dict__):
        weight = params[f"{name}.{child}.weight"]
        factors = clone.__dict__[child].weight
        weight._local_tensor.mul_(factors[slice(*own_rows(weight))])
