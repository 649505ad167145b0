# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The flags of this package without Megatron-FSDP: upstream's Muon, with our tags.

A run under DDP with the same flags is the reference for one under Megatron-FSDP.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import optimizer as mcore_optimizer

from megatron_muon.mcore.arguments import MUON_OPTIMIZERS, requested_splits, skips_router
from megatron_muon.mcore.routing import router_rule
from megatron_muon.mcore.splits import tag_blocks
from megatron_muon.plan.layout import Splits


def asks_for_more(config: Any) -> bool:
    """Return whether the flags ask for more than upstream's function does by itself.

    Args:
        config: Optimizer configuration.
    """
    # Inside of build_with_flags, a source tree with our patches asks a second time.
    is_building = mcore_optimizer._get_qkv_split_shapes is _no_split_shapes
    if config.optimizer not in MUON_OPTIMIZERS or is_building:
        return False
    splits = requested_splits(config)
    return splits != Splits(qkv=splits.qkv) or skips_router()


def build_with_flags(
    original: Callable[..., Any],
    config: Any,
    model_chunks: Sequence[Any],
    config_overrides: dict[Any, Any] | None,
    pg_collection: Any,
) -> Any:
    """Call ``_get_megatron_emerging_optimizer`` with what the flags ask for.

    Args:
        original: Upstream's function.
        config: Optimizer configuration.
        model_chunks: Model chunks, not of Megatron-FSDP.
        config_overrides: Per-parameter settings.
        pg_collection: Process groups of the model.
    """
    for chunk in model_chunks:
        tag_blocks(chunk, requested_splits(config), lambda param: param.shape[0])
    overrides = {**(config_overrides or {}), **router_rule(config)}
    # Only the tags decide what is split, as under Megatron-FSDP.
    config = copy.copy(config)
    config.muon_split_qkv = True
    # Upstream's function would overwrite our tags of query, key and value.
    upstream = mcore_optimizer._get_qkv_split_shapes
    mcore_optimizer._get_qkv_split_shapes = _no_split_shapes
    try:
        return original(config, model_chunks, overrides, pg_collection)
    finally:
        mcore_optimizer._get_qkv_split_shapes = upstream


def _no_split_shapes(_model_config: Any) -> list[int]:
    """Return a size of which no number of rows is a multiple, so that upstream tags nothing."""
    return [2**62]
