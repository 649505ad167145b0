# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The parameters of a transformer, by layer, and published shapes."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.layout import Splits, all_heads, halves


class Parameter(NamedTuple):
    """A parameter of a layer, whole over tensor parallelism.

    Args:
        name: Within the layer.
        shape: One or two dimensions.
        partition_dim: Dimension that tensor parallelism shards; None for copies on all ranks.
        split: Rows of one group by block, such as query, key and value; None for one block.
        head_rows: Rows of a head, if every head is a block on one tensor-parallel rank; 0 where
            every block of a group is a head.
        is_gated: Whether gate and up are blocks.
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None = None
    split: tuple[int, ...] | None = None
    head_rows: int | None = None
    is_gated: bool = False

    def blocks(self, num_rows: int) -> tuple[int, ...] | None:
        """Return the rows of a group by block; None for one block.

        Args:
            num_rows: Rows that one tensor-parallel rank has.
        """
        if self.is_gated:
            return halves(num_rows)
        if self.split is None or self.head_rows is None:
            return self.split
        return all_heads(self.split, num_rows, self.head_rows)


@dataclass(frozen=True)
class ModelShape:
    """A decoder of Megatron-LM; fields are named like its flags. SwiGLU, no biases.

    The parameters of a layer are listed without embeddings and output layer: Muon does not step
    them, and they are not part of a layer's buffers.

    Args:
        num_layers: Layers.
        hidden_size: Model width.
        ffn_hidden_size: Width of dense feed-forward layers.
        num_attention_heads: Query heads.
        num_query_groups: Key and value heads.
        kv_channels: Width of a head; 0 for ``hidden_size / num_attention_heads``.
        num_experts: Experts of a mixture-of-experts layer; 0 for a dense model.
        moe_ffn_hidden_size: Width of an expert.
        moe_shared_expert_intermediate_size: Width of the shared expert; 0 for none.
        num_dense_layers: First layers of a mixture of experts that are dense.
        q_lora_rank: Width of compressed queries; above 0, attention is multi-latent.
        kv_lora_rank: Width of compressed keys and values.
        qk_head_dim: Width of a head's query and key, without rotary part.
        qk_pos_emb_head_dim: Width of the rotary part.
        v_head_dim: Width of a head's value.
        qk_layernorm: Whether queries and keys are normalized by head.
        moe_router_topk: Experts per token.
        vocab_size: Rows of the embedding and of the output layer.
        untie_embeddings_and_output_weights: Whether both have weights of their own.

    Raises:
        ValueError: Sizes that do not divide, or are missing.
    """

    num_layers: int = 0
    hidden_size: int = 0
    ffn_hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int = 0
    kv_channels: int = 0
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    num_dense_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    qk_layernorm: bool = False
    moe_router_topk: int = 2
    vocab_size: int = 0
    untie_embeddings_and_output_weights: bool = False

    def __post_init__(self) -> None:
        """Check that sizes are there and divide."""
        # The first five have no sensible default, and users forget them.
        for field in dataclasses.fields(self)[:5]:
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name}: expected a positive number, got {getattr(self, field.name)}. "
                    f"Pass --{field.name.replace('_', '-')}, or --preset or --hf."
                )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups: expected a divisor of {self.num_attention_heads} heads, got "
                f"{self.num_query_groups}."
            )
        if self.num_experts and not self.moe_ffn_hidden_size:
            raise ValueError(
                "moe_ffn_hidden_size: expected the width of an expert, got 0. "
                "Pass --moe-ffn-hidden-size."
            )

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    @property
    def head_elements(self) -> int:
        """Elements of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_elements(self) -> int:
        """Elements of embedding and output layer, which may share them."""
        return self.head_elements * (2 if self.untie_embeddings_and_output_weights else 1)

    def stage(
        self, num_stages: int, num_expert_ranks: int, splits: Splits
    ) -> tuple[list[list[Parameter]], list[list[Parameter]]]:
        """List dense parameters and one rank's experts by layer of the first pipeline stage."""
        # The first stage has the most layers where they do not divide.
        layers = range(-(-self.num_layers // num_stages))
        num_experts = self.num_experts // num_expert_ranks
        return (
            [self.dense_parameters(layer, splits) for layer in layers],
            [self.expert_parameters(layer, num_experts, splits) for layer in layers],
        )

    def dense_parameters(self, layer: int, splits: Splits) -> list[Parameter]:
        """List the parameters of a layer but for its experts, in Megatron-LM's order."""
        # Parameters that Muon does not step are listed too: they take room in the buffer, and so
        # move the borders of shards.
        parameters = [Parameter("input_layernorm.weight", (self.hidden_size,))]
        attention = self._latent_attention if self.q_lora_rank else self._attention
        parameters += attention(splits)
        parameters.append(Parameter("pre_mlp_layernorm.weight", (self.hidden_size,)))
        if not self.is_moe(layer):
            return parameters + self._feed_forward("mlp", self.ffn_hidden_size, splits)
        parameters.append(Parameter("mlp.router.weight", (self.num_experts, self.hidden_size)))
        if self.moe_shared_expert_intermediate_size:
            parameters += self._feed_forward(
                "mlp.shared_experts", self.moe_shared_expert_intermediate_size, splits
            )
        return parameters

    def expert_parameters(
        self, layer: int, num_local_experts: int, splits: Splits
    ) -> list[Parameter]:
        """List the parameters of one expert-parallel rank's experts, grouped GEMM."""
        if not self.is_moe(layer):
            return []
        # Grouped GEMM registers all first layers, then all second ones: that order is the buffer's.
        fc1, fc2 = self._feed_forward("mlp.experts", self.moe_ffn_hidden_size, splits)
        return [
            linear._replace(name=f"{linear.name}{expert}")
            for linear in (fc1, fc2)
            for expert in range(num_local_experts)
        ]

    def _feed_forward(self, name: str, width: int, splits: Splits) -> list[Parameter]:
        # SwiGLU fuses gate and up.
        fc1 = Parameter(f"{name}.linear_fc1.weight", (2 * width, self.hidden_size), 0)
        return [
            fc1._replace(is_gated=splits.glu),
            Parameter(f"{name}.linear_fc2.weight", (self.hidden_size, width), 1),
        ]

    def _attention(self, splits: Splits) -> list[Parameter]:
        channels = self.kv_channels or self.hidden_size // self.num_attention_heads
        query_rows = self.num_attention_heads // self.num_query_groups * channels
        split = (query_rows, channels, channels)
        parameters = [
            Parameter(
                "self_attention.linear_proj.weight",
                (self.hidden_size, self.num_attention_heads * channels),
                1,
            ),
            Parameter(
                "self_attention.linear_qkv.weight",
                (self.num_query_groups * sum(split), self.hidden_size),
                0,
                split if splits.qkv else None,
                channels if splits.per_head else None,
            ),
        ]
        if self.qk_layernorm:
            parameters += [
                Parameter(f"self_attention.{x}_layernorm.weight", (channels,)) for x in "qk"
            ]
        return parameters

    def _latent_attention(self, splits: Splits) -> list[Parameter]:
        heads = self.num_attention_heads
        query = heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        key_value = heads * (self.qk_head_dim + self.v_head_dim)
        # The rotary part of keys is not compressed; it comes out of the same projection. The down
        # projections are replicated over tensor-parallel ranks.
        compressed = self.kv_lora_rank + self.qk_pos_emb_head_dim
        head_rows = 0 if splits.mla and splits.per_head else None
        query_blocks, key_value_blocks = (
            ((self.qk_head_dim, second) if splits.mla else None, head_rows)
            for second in (self.qk_pos_emb_head_dim, self.v_head_dim)
        )
        return [
            Parameter(
                "self_attention.linear_proj.weight", (self.hidden_size, heads * self.v_head_dim), 1
            ),
            Parameter(
                "self_attention.linear_q_down_proj.weight", (self.q_lora_rank, self.hidden_size)
            ),
            Parameter(
                "self_attention.linear_q_up_proj.weight",
                (query, self.q_lora_rank),
                0,
                *query_blocks,
            ),
            Parameter("self_attention.linear_kv_down_proj.weight", (compressed, self.hidden_size)),
            Parameter(
                "self_attention.linear_kv_up_proj.weight",
                (key_value, self.kv_lora_rank),
                0,
                *key_value_blocks,
            ),
            Parameter("self_attention.q_layernorm.weight", (self.q_lora_rank,)),
            Parameter("self_attention.kv_layernorm.weight", (self.kv_lora_rank,)),
        ]


# Published configurations: config.json of meta-llama/Meta-Llama-3-8B and -70B, Qwen/Qwen3-30B-A3B,
# Qwen/Qwen3-235B-A22B and deepseek-ai/DeepSeek-V3 on the Hugging Face hub.
PRESETS = {
    "llama3-8b": ModelShape(
        32, 4096, 14336, 32, 8, vocab_size=128256, untie_embeddings_and_output_weights=True
    ),
    "llama3-70b": ModelShape(
        80, 8192, 28672, 64, 8, vocab_size=128256, untie_embeddings_and_output_weights=True
    ),
    "qwen3-30b-a3b": ModelShape(
        48, 2048, 6144, 32, 4, kv_channels=128, num_experts=128, moe_ffn_hidden_size=768,
        qk_layernorm=True, moe_router_topk=8, vocab_size=151936,
        untie_embeddings_and_output_weights=True,
    ),
    "qwen3-235b-a22b": ModelShape(
        94, 4096, 12288, 64, 4, kv_channels=128, num_experts=128, moe_ffn_hidden_size=1536,
        qk_layernorm=True, moe_router_topk=8, vocab_size=151936,
        untie_embeddings_and_output_weights=True,
    ),
    "deepseek-v3": ModelShape(
        61, 7168, 18432, 128, 128, num_experts=256, moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048, num_dense_layers=3, q_lora_rank=1536,
        kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128,
        moe_router_topk=8, vocab_size=129280, untie_embeddings_and_output_weights=True,
    ),
}  # fmt: skip
