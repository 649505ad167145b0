# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT under Megatron-FSDP from megatron-core alone, without megatron.training."""

from typing import Any

import torch
import torch.distributed as dist

from helpers.device import device, init_group

VOCAB_SIZE, SEQ_LENGTH = 48, 8


def build_model(sharding: str = "optim_grads_params", **ddp_settings: Any) -> Any:
    """Start the process groups and wrap a two-layer GPT in Megatron-FSDP.

    The weights before they were sharded, the same on every rank, are kept in ``whole_weights``.
    """
    import megatron_muon

    megatron_muon.enable()
    instances = "num_distributed_optimizer_instances"
    start_process_groups(**{instances: ddp_settings.get(instances, 1)})
    gpt = build_gpt()
    whole = {name: param.detach().clone() for name, param in gpt.named_parameters()}
    model = wrap_gpt(gpt, sharding, **ddp_settings)
    model.whole_weights = whole
    return model


def start_process_groups(**sizes: int) -> None:
    """Start torch's and Megatron's process groups in place of an earlier model's."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
    else:
        init_group()
    parallel_state.initialize_model_parallel(**sizes)


def build_gpt(*, is_tied: bool = False, **config_settings: Any) -> Any:
    """Build a two-layer GPT, the same on every rank and in every call."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    is_latent = "kv_lora_rank" in config_settings
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        **{
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "persist_layer_norm": False,
            "gradient_accumulation_fusion": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **config_settings,
        }
    )
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization="RMSNorm",
        multi_latent_attention=is_latent,
    )
    mtp = get_gpt_mtp_block_spec(config, layer, False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        layer,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=is_tied,
        mtp_block_spec=mtp,
    ).to(device())


def wrap_gpt(gpt: Any, sharding: str, **ddp_settings: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=sharding,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,
        **ddp_settings,
    )
    model = FullyShardedDataParallel(gpt.config, ddp_config, gpt)
    with model.no_sync():
        pass
    return model


def build_optimizer(model: Any, **settings: Any) -> Any:
    """Build the optimizer the way a script on megatron-core does, with the patches enabled."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import megatron_muon

    megatron_muon.enable()
    config = OptimizerConfig(
        **{
            "optimizer": "muon",
            "lr": 0.01,
            "weight_decay": 0.1,
            "use_distributed_optimizer": True,
            **settings,
        }
    )
    return get_megatron_optimizer(config, [model])


def run_backward(
    model: Any, seed: int = 0, is_last: bool = True, *, data_of_rank: int | None = None
) -> float:
    """Run forward and backward on random tokens, the last microbatch of a step or another one.

    Tokens follow from seed and rank, this rank's unless another one is given.
    """
    import contextlib

    from megatron.core.pipeline_parallel.schedules import custom_backward

    rank = dist.get_rank() if data_of_rank is None else data_of_rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(VOCAB_SIZE, (2, SEQ_LENGTH + 1), generator=generator).to(device())
    positions = torch.arange(SEQ_LENGTH, device=device()).expand(2, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, device=device()).tril() < 0.5
    with contextlib.nullcontext() if is_last else model.no_sync():
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
        # As Megatron's schedule does: the mode of cpu_ranks is off inside of loss.backward().
        custom_backward(loss, None)
    return loss.item()


def main_weights(model: Any) -> dict[str, Any]:
    buffers = model.param_and_grad_buffer
    return {
        name: param._local_tensor.detach().clone()
        for name, param in buffers.optimizer_named_parameters
    }


def are_equal(first: dict[str, Any], second: dict[str, Any]) -> list[bool]:
    """Compare the tensors of ``first`` with those of the same names, bit for bit."""
    return [torch.equal(first[name], second[name]) for name in first]


def model_weights(model: Any) -> list[Any]:
    """Copy the bits of this rank's part of the weights that the next forward pass gathers.

    As integers: the buffer's padding is uninitialized, and a NaN there would differ from itself.
    """
    return [
        group.model_weight_buffer.data.clone().view(torch.int32)
        for group in model.param_and_grad_buffer.parameter_groups
        if group.model_weight_buffer is not None
    ]
