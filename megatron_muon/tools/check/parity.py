# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Losses of a small GPT, trained by Muon under Megatron-FSDP or by upstream's under DDP."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from megatron_muon.mcore.enable import enable

_VOCAB_SIZE, _SEQ_LENGTH, _BATCH_SIZE = 64, 16, 4


def train_small_gpt(*, is_sharded: bool, num_steps: int) -> list[float]:
    """Train two layers of width 64 in fp32, from the same weights and on the same tokens.

    Args:
        is_sharded: Under Megatron-FSDP, ZeRO-3; otherwise under DDP.
        num_steps: Steps.

    Returns:
        The mean loss of all ranks before every step.

    Communication: the process groups of ``parallel_state`` over the job, the collectives of a
        training step, and an all-reduce of one element a step.
    """
    enable()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        model = _wrapped_gpt(is_sharded)
        config = OptimizerConfig(
            optimizer="muon",
            lr=0.01,
            weight_decay=0.1,
            muon_fp32_matmul_prec="highest",
            use_distributed_optimizer=is_sharded,
        )
        optimizer = get_megatron_optimizer(config, [model])
        generator = torch.Generator().manual_seed(dist.get_rank())
        return [_step(model, optimizer, generator) for _ in range(num_steps)]
    finally:
        parallel_state.destroy_model_parallel()


def _wrapped_gpt(is_sharded: bool) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=_VOCAB_SIZE,
        max_sequence_length=_SEQ_LENGTH,
    ).cuda()
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=is_sharded,
        use_distributed_optimizer=is_sharded,
        data_parallel_sharding_strategy="optim_grads_params" if is_sharded else "no_shard",
        overlap_grad_reduce=is_sharded,
        overlap_param_gather=is_sharded,
        gradient_reduce_div_fusion=False,
    )
    wrapper = FullyShardedDataParallel if is_sharded else DistributedDataParallel
    return wrapper(config, ddp_config, gpt)


def _step(
    model: Any,  # noqa: ANN401 - either wrapper of Megatron
    optimizer: Any,  # noqa: ANN401
    generator: torch.Generator,
) -> float:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    # Each token follows from the one before it.
    starts = torch.randint(_VOCAB_SIZE, (_BATCH_SIZE, 1), generator=generator)
    batch = ((starts + 3 * torch.arange(_SEQ_LENGTH + 1)) % _VOCAB_SIZE).cuda()
    positions = torch.arange(_SEQ_LENGTH, device="cuda").expand(_BATCH_SIZE, -1)
    mask = torch.ones(1, 1, _SEQ_LENGTH, _SEQ_LENGTH, device="cuda").tril() < 0.5
    loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).float().mean()
    loss.backward()
    if isinstance(model, DistributedDataParallel):
        model.finish_grad_sync()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
