# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Upstream's Muon under DDP with the blocks and routes of flags that it does not have.

Its own code splits what is tagged. The flags themselves are refused without Megatron-FSDP.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from megatron_muon.plan.layout import Splits

_SPLITS = {
    "glu": "--muon-split-glu",
    "mla": "--muon-split-mla",
    "per_head": "--muon-split-qkv-per-head",
}
SKIP_ROUTER = "--moe-router-skip-muon"


def under_ddp(
    flags: Sequence[str], before: Callable[[], None] | None = None
) -> tuple[list[str], Callable[[], None] | None]:
    """Return the flags that upstream has, and a function to be called before the launcher."""
    ours = {*_SPLITS.values(), SKIP_ROUTER}
    if ours.isdisjoint(flags):
        return list(flags), before
    splits = Splits(
        qkv="--muon-no-split-qkv" not in flags,
        **{name: flag in flags for name, flag in _SPLITS.items()},
    )
    function = functools.partial(_tag_and_route, splits, SKIP_ROUTER in flags, before)
    return [flag for flag in flags if flag not in ours], function


def _tag_and_route(splits: Splits, skips_router: bool, before: Callable[[], None] | None) -> None:
    from megatron.core import optimizer as module
    from megatron.core.optimizer.optimizer_config import ParamKey

    from megatron_muon.mcore.splits import tag_blocks

    if before is not None:
        before()
    original = module._get_megatron_emerging_optimizer

    @functools.wraps(original)
    def build(
        config: Any, model_chunks: Any, config_overrides: Any = None, pg_collection: Any = None
    ) -> Any:
        for chunk in model_chunks:
            tag_blocks(chunk, splits, lambda param: param.shape[0])
        overrides = dict(config_overrides or {})
        if skips_router:
            to_scalar = {"optimizer": config.muon_scalar_optimizer}
            overrides[ParamKey(name="*.router.weight")] = to_scalar
        # Only the tags decide about splits, as under Megatron-FSDP.
        config = copy.copy(config)
        config.muon_split_qkv = True
        # A size that divides no number of rows, so that upstream keeps the tags.
        with mock.patch.object(module, "_get_qkv_split_shapes", lambda config: [2**62]):
            return original(config, model_chunks, overrides, pg_collection)

    module._get_megatron_emerging_optimizer = build
