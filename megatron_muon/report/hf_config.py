# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Model shapes from the config.json of transformers, without transformers.

Source: ``configuration_*.py`` of transformers 5.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_muon.report.model_shape import ModelShape

# Families by model_type. All have gated feed-forward layers, and the same matrices in every layer
# but the first dense ones of a mixture of experts.
_DENSE = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "olmo3", "phi3",
    "qwen2", "qwen3", "seed_oss", "smollm3",
)  # fmt: skip
_EXPERTS = ("glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
# Experts as wide as intermediate_size.
_ONE_WIDTH = ("gpt_oss", "mixtral", "olmoe")
# Defaults of classes that published files leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 256, "vocab_size": 262208, "tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "smollm3": {"tie_word_embeddings": True},
}
_FUSED = ("phi3",)
_QK_NORM = ("gemma3_text", "olmoe", "qwen3", "qwen3_moe")
_LATENT_KEYS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def read_config(path: Path, *, is_fsdp2: bool = False) -> ModelShape:
    """Read the shape of a decoder from a config.json; of several models, the text model's.

    DeepSeek-V2-Lite, without ``q_lora_rank``, is refused, and under FSDP2 models whose dense
    matrices are fused.

    Raises:
        ValueError: The file is no config.json, lacks a key, or has an unknown architecture.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--hf {path}: expected a config.json, got {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"--hf {path}: expected an object, got {type(config).__name__}.")
    text = config.get("text_config") or {}
    # Of models of several kinds of input some keys are outside.
    return _shape(f"--hf {path}", {**config, **text}, is_fsdp2=is_fsdp2)


def _shape(source: str, config: Mapping[str, Any], *, is_fsdp2: bool) -> ModelShape:
    kind = config.get("model_type")
    if is_fsdp2 and kind in _FUSED:
        raise ValueError(
            f"{source}: expected a model with matrices of its own for query, key and value, got "
            f"{kind}, which fuses them. Leave out --fsdp2 for an estimate."
        )
    if kind not in (*_DENSE, *_EXPERTS, *_LATENT):
        raise ValueError(
            f"{source}: expected a model_type of {', '.join([*_DENSE, *_EXPERTS, *_LATENT])}, got "
            f"{kind}. Pass the shape by Megatron's flags, --num-layers and so on."
        )

    config = {**_DEFAULTS.get(kind, {}), **config}

    def number(*names: str, default: int | None = None) -> int:
        """Return the first of several keys."""
        for name in names:
            if type(config.get(name)) is int:
                return int(config[name])
        if default is None:
            raise ValueError(f"{source}: expected a whole number as {names[0]}, got none.")
        return default

    if (
        config.get("mlp_only_layers")
        or number("decoder_sparse_step", "moe_layer_freq", default=1) != 1
    ):
        raise ValueError(
            f"{source}: expected experts in all layers but the first ones, got mlp_only_layers "
            "or a decoder_sparse_step. Pass the nearest shape by Megatron's flags."
        )
    heads = number("num_attention_heads")
    fields: dict[str, Any] = {}
    if kind not in _DENSE:
        width = number("intermediate_size" if kind in _ONE_WIDTH else "moe_intermediate_size")
        shared = number("n_shared_experts", default=0) * width
        fields = {
            "num_experts": number("n_routed_experts", "num_experts", "num_local_experts"),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": number(
                "shared_expert_intermediate_size", default=shared
            ),
            "num_dense_layers": number("first_k_dense_replace", default=0),
            "moe_router_topk": number("num_experts_per_tok", "experts_per_token"),
        }
    if kind in _LATENT:
        fields |= {field: number(key) for field, key in _LATENT_KEYS.items()}
    return ModelShape(
        num_layers=number("num_hidden_layers"),
        hidden_size=number("hidden_size"),
        ffn_hidden_size=number("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=number("num_key_value_heads", default=heads),
        kv_channels=number("head_dim", default=0),
        qk_layernorm=kind in _QK_NORM,
        vocab_size=number("vocab_size"),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        **fields,
    )
