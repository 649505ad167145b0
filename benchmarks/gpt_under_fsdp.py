# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A GPT under Megatron-FSDP and its Muon, for benchmarks that count and time a step on a CPU."""

from typing import Any


def build_gpt(vocab_size: int, max_sequence_length: int, **config: Any) -> Any:
    """Wrap a GPT with SwiGLU and rotary positions in Megatron-FSDP ``optim_grads_params``.

    Args:
        vocab_size: Rows of the embedding.
        max_sequence_length: Longest sequence.
        **config: Arguments of Megatron's ``TransformerConfig``, sizes among them.
    """
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    transformer = TransformerConfig(
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **config,
    )
    gpt = GPTModel(
        transformer,
        get_gpt_layer_local_spec(
            num_experts=config.get("num_moe_experts"), normalization=config.get("normalization")
        ),
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,
    )
    return FullyShardedDataParallel(transformer, ddp_config, gpt)


def build_muon(model: Any, **options: Any) -> Any:
    """Build Muon with Nesterov, weight decay and clipping, and Lion for other parameters.

    Args:
        model: See ``build_gpt()``.
        **options: Fields of ``MuonOptions``.
    """
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    import megatron_muon

    config = OptimizerConfig(
        optimizer="muon",
        lr=0.01,
        weight_decay=0.1,
        clip_grad=1e-3,  # below the norm of any gradient here, so that it always clips
        use_distributed_optimizer=True,
        muon_nesterov=True,
        muon_scalar_optimizer="lion",
    )
    vars(config).update(options)
    return megatron_muon.build_megatron_fsdp_emerging_optimizer(
        config, [model], get_standard_config_overrides(config)
    )


def norms_as_on_a_gpu() -> None:
    """Compute the norm of a shard in one call, as a GPU does: a CPU cuts large shards.

    Raises:
        RuntimeError: Norms are computed otherwise by now.
    """
    import torch

    from megatron_muon.runtime import norms

    if not (hasattr(norms, "_PIECE_ELEMENTS") and hasattr(norms, "sums_of_squares")):
        raise RuntimeError(
            "norms: expected the size of a CPU's pieces and their sums, got neither. Let norms "
            "take a GPU's way here otherwise."
        )
    norms._PIECE_ELEMENTS = 2**62
    norms.sums_of_squares = lambda tensors: torch.stack(
        torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    ).square_()


def clip_as_with_transformer_engine() -> None:
    """Let Megatron compute the gradient norm and clip by fused calls, without a host read."""
    import torch
    from megatron.core.optimizer import clip_grads

    def norm(_: int, __: Any, tensors: Any, *___: Any) -> tuple[torch.Tensor, None]:
        """Return the norm of all tensors."""
        return torch.stack(torch._foreach_norm(tensors[0])).norm().reshape(1), None

    def scale(_: int, __: Any, tensors: Any, factor: torch.Tensor) -> None:
        """Scale tensors in place."""
        # A list: with one tensor a CPU reads its value.
        torch._foreach_mul_(tensors[1], [factor] * len(tensors[1]))

    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_tensor_impl = norm, scale
