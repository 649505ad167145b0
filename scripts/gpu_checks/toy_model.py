# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT under Megatron-FSDP, on one GPU or on CPU ranks, and Muon over it."""

import contextlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from gpu_checks import ranks
from gpu_checks.report import Device

VOCAB_SIZE, SEQ_LENGTH, BATCH_SIZE = 48, 16, 2


@dataclass(frozen=True)
class Size:
    """What the model is made of.

    Args:
        hidden: Hidden size.
        layers: Layers.
        num_experts: Experts of each layer; 0 for a dense model.
        is_fused: Whether the linear layers are Transformer Engine's and add weight gradients to
            the main gradients themselves.
    """

    hidden: int = 32
    layers: int = 2
    num_experts: int = 0
    is_fused: bool = False


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be imported."""
    try:
        return importlib.util.find_spec("transformer_engine.pytorch") is not None
    except (ImportError, ValueError):
        return False


def start(device: Device) -> torch.device:
    """Join the ranks, make Megatron's groups, and enable the patches."""
    ranks.prepare_megatron(device)
    found = ranks.start(device)
    from megatron.core import parallel_state

    import megatron_muon

    parallel_state.initialize_model_parallel()
    megatron_muon.enable()
    return found


def build_gpt(size: Size, device: torch.device) -> tuple[Any, Any]:
    """Build the same GPT on every rank; return it with its configuration.

    A fused model ends with its last layer where Apex is missing: Megatron's own output layer needs
    Apex to add to the main gradients.
    """
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    experts: dict[str, Any] = {}
    if size.num_experts:
        experts = {
            "num_moe_experts": size.num_experts,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": size.is_fused,
            "moe_ffn_hidden_size": size.hidden,
        }
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=size.is_fused,
        attention_backend=AttnBackend.unfused,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **experts,
    )
    common = {"num_experts": size.num_experts or None, "moe_grouped_gemm": size.is_fused}
    spec = (
        get_gpt_layer_with_transformer_engine_spec(**common)
        if size.is_fused
        else get_gpt_layer_local_spec(normalization="RMSNorm", **common)
    )
    has_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    # Weights are drawn from Megatron's generators.
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    gpt = GPTModel(
        config,
        spec,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=False,
        post_process=has_apex or not size.is_fused,
    )
    return gpt.to(device), config


def wrap(gpt: Any, config: Any, strategy: str, device: torch.device) -> Any:
    """Let Megatron-FSDP shard a model over all ranks."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=device.type == "cuda",
    )
    return FullyShardedDataParallel(config, ddp_config, gpt)


def loss_of(model: Any, seed: int, device: torch.device) -> torch.Tensor:
    """Return the loss of one microbatch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCAB_SIZE, (BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    drawn = drawn.to(device)
    positions = torch.arange(SEQ_LENGTH, device=device).expand(BATCH_SIZE, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, device=device).tril() < 0.5
    output = model(drawn[:, :-1], positions, mask, labels=drawn[:, 1:])
    if output.dim() == 3:
        # Without an output layer: hidden states ``(seq, batch, hidden)``, weighed at random.
        weights = torch.randn(output.shape, generator=generator).to(device)
        return (output.float() * weights).mean()
    return output.float().mean()


def run_backward(model: Any, device: torch.device, *, seeds: list[int]) -> float:
    """Accumulate the gradients of microbatches under Megatron-FSDP; return the mean loss."""
    model.zero_grad_buffer()
    total = 0.0
    for index, seed in enumerate(seeds):
        is_last = index == len(seeds) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = loss_of(model, seed, device) / len(seeds)
            loss.backward()
        total += loss.item()
    return total


def build_optimizer(model: Any, **settings: Any) -> Any:
    """Build Muon as a script on megatron-core does."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    defaults = {
        "optimizer": "muon",
        "lr": 0.01,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "use_distributed_optimizer": True,
        "muon_nesterov": True,
    }
    return get_megatron_optimizer(OptimizerConfig(**{**defaults, **settings}), [model])
