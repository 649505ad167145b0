# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of two defects of HFSDP (``--outer-dp-sharding-strategy optim``) in megatron-core 0.19.2.

Both hide under Adam, whose update does not change when gradients are scaled, and neither under
Muon, whose momentum mixes gradients that were clipped differently.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.mcore.fsdp_model import grad_stats_group, shards_over_outer_ranks


def keep_gradient_scaling_factor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_create_hfsdp_helper_buffer``, which drops the gradient scaling factor.

    Gradients are reduced through the helper buffer, so without the factor of 1 / dp they come out
    dp times too large.
    """

    @functools.wraps(original)
    def _create_hfsdp_helper_buffer(
        dp_buffer: Any, inner_dp_group: Any, is_data_distributed: bool
    ) -> Any:
        helper = original(dp_buffer, inner_dp_group, is_data_distributed)
        helper.gradient_scaling_factor = dp_buffer.gradient_scaling_factor
        return helper

    return _create_hfsdp_helper_buffer


def reduce_grad_norm_over_instances(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_megatron_optimizer_based_on_param_groups`` to take HFSDP's norm over all shards.

    Upstream reduces it over one optimizer instance, which under HFSDP holds a part of the shards:
    instances see different norms and clip differently.
    """

    @functools.wraps(original)
    def _get_megatron_optimizer_based_on_param_groups(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        model_chunks = kwargs["model_chunks"] if "model_chunks" in kwargs else args[1]
        ddp_config = getattr(model_chunks[0], "ddp_config", None)
        if getattr(ddp_config, "use_megatron_fsdp", False) and shards_over_outer_ranks(ddp_config):
            groups = kwargs.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
            optimizer.grad_stats_parallel_group = grad_stats_group(
                ddp_config, groups, is_expert=False
            )
        return optimizer

    return _get_megatron_optimizer_based_on_param_groups

