# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Tag the parameters whose rows are orthogonalized in blocks, and route parameters to optimizers.

The tags are upstream's (``is_qkv``, ``qkv_split_shapes``), which are valid for any rows. Only this
file decides the blocks of a parameter, by the module that holds it.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamPredicate

from megatron_muon.mcore.sharded_matrices import entry_of
from megatron_muon.mcore.unsupported import MUON_OPTIMIZERS
from megatron_muon.plan.layout import Splits, all_heads, halves

# Classes in which gate and up alternate, and the field of their configuration with the block size.
# Source: megatron-core 0.19.2, moe/experts.py and moe/shared_experts.py.
_INTERLEAVED = {
    "TEGroupedMLP": "moe_mlp_glu_interleave_size",
    "FusedSharedExpertMLP": "moe_shared_expert_glu_interleave_size",
}


def tag_blocks(chunk: Any, splits: Splits, num_rows: Callable[[Any], int]) -> None:
    """Tag the parameters of a model chunk that are split.

    Args:
        chunk: Model chunk, wrapped or not.
        splits: Layers to split.
        num_rows: Returns the tensor-parallel-local rows of a parameter.

    Raises:
        ValueError: Heads are to be orthogonalized separately, and a tensor-parallel rank holds
            parts of them.
    """
    for name, holder, param in _fused_weights(chunk):
        rows = num_rows(param)
        shapes = _split_shapes(holder, name, rows, chunk.config, splits)
        if shapes is None:
            continue
        by_head = splits.per_head and name != "linear_fc1"
        if rows % sum(shapes):
            # Fewer query groups than tensor-parallel ranks: upstream splits none either.
            if by_head:
                raise ValueError(
                    f"{name}: expected whole query groups of {sum(shapes)} rows on each "
                    f"tensor-parallel rank, got {rows} rows. Leave out --muon-split-qkv-per-head, "
                    "or use fewer tensor-parallel ranks."
                )
            continue
        if by_head:
            shapes = all_heads(shapes, rows, chunk.config.kv_channels * (name == "linear_qkv"))
            # A head is whole on one tensor-parallel rank: joining would mix it with others.
            param.is_split_by_head = True
        param.is_qkv = True
        param.qkv_split_shapes = list(shapes)


def _fused_weights(chunk: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the trainable matrices that may be split, with name and parent of their layer."""
    names = ("linear_qkv", "linear_fc1", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    for holder in chunk.modules():
        for name, linear in holder.named_children():
            # Grouped experts have several: weight0, weight1, ...
            for key, param in linear.named_parameters(recurse=False) if name in names else ():
                if key.startswith("weight") and param.dim() == 2 and param.requires_grad:
                    yield name, holder, param


def _split_shapes(
    holder: Any, name: str, num_rows: int, model_config: Any, splits: Splits
) -> tuple[int, ...] | None:
    """Return the rows of a group per block; None for a matrix that is not split."""
    if name == "linear_qkv":
        return tuple(_get_qkv_split_shapes(model_config)) if splits.qkv else None
    config = holder.config
    if name == "linear_fc1":
        if not splits.glu or not config.gated_linear_unit:
            return None
        field = _INTERLEAVED.get(type(holder).__name__)
        interleave = getattr(config, field, None) if field is not None else None
        return (interleave, interleave) if interleave else halves(num_rows)
    if not splits.mla:
        return None
    second = config.v_head_dim if name == "linear_kv_up_proj" else config.qk_pos_emb_head_dim
    return config.qk_head_dim, second


def routing_rule(config: OptimizerConfig, *, skips_router: bool) -> dict[ParamKey, Any]:
    """Return the overrides that assign parameters to a scalar optimizer.

    Megatron's rule selects parameters that are not matrices. With Muon,
    ``config.muon_scalar_optimizer`` steps them, routers with ``skips_router``, and parameters that
    modules mark, as Mamba does ``in_proj``; with other optimizers, Adam does.
    """
    rule = copy.deepcopy(entry_of(config.optimizer).default_param_overrides)
    if config.optimizer not in MUON_OPTIMIZERS:
        return rule
    to_scalar = {"optimizer": config.muon_scalar_optimizer}
    for override in rule.values():
        override.update(to_scalar)
    excluded = ParamPredicate("asks_for_another", lambda p: getattr(p, "use_muon", True) is False)
    rule[ParamKey(predicate=excluded)] = to_scalar
    if skips_router:
        rule[ParamKey(name="*.router.weight")] = to_scalar
    return rule
