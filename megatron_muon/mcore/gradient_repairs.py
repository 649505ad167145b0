# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of the scale and norm of Megatron-FSDP's gradients in megatron-core 0.19.2.

Adam hides all three defects, as its update hardly changes when gradients are scaled. They matter
for Muon, whose momentum mixes gradients that were clipped or scaled differently.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.mcore.fsdp_model import grad_stats_group, shards_over_outer_ranks

_IS_GRADIENT_BUFFER = "_megatron_muon_is_gradient_buffer"


def keep_gradient_scaling_factor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_create_hfsdp_helper_buffer``, which drops the gradient scaling factor.

    Gradients are reduced through the helper buffer: without the factor of 1 / dp they are dp times
    too large. Over one inner rank, the helper of gradients must be a sharded buffer for the reason
    that :func:`scale_each_microbatch_once` gives.
    """

    @functools.wraps(original)
    def _create_hfsdp_helper_buffer(
        dp_buffer: Any, inner_dp_group: Any, is_data_distributed: bool
    ) -> Any:
        is_sharded = is_data_distributed or getattr(dp_buffer, _IS_GRADIENT_BUFFER, False)
        helper = original(dp_buffer, inner_dp_group, is_sharded)
        helper.gradient_scaling_factor = dp_buffer.gradient_scaling_factor
        return helper

    return _create_hfsdp_helper_buffer


def scale_each_microbatch_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DataParallelBuffer.__init__``, whose gradients over one rank are scaled repeatedly.

    If gradients are sharded, every microbatch is reduced and added to its shard. Over a group of
    one rank (experts with as many expert-parallel as data-parallel ranks, or one inner rank under
    HSDP) upstream makes the buffer unsharded: microbatches accumulate in it, and every reduction
    multiplies all of it by 1 / dp again; with another communication dtype it even adds the buffer
    to itself. A sharded buffer of one shard is handled as that of any other group.

    Only gradient buffers have the argument of a scaling factor, which may be None.

    Source: NVIDIA/Megatron-LM issue 6660 and pull request 6773, which came after 0.19.2.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        given = bound.arguments
        strategy = given["ddp_config"].data_parallel_sharding_strategy
        if "gradient_scaling_factor" in given and strategy in ("optim_grads", "optim_grads_params"):
            given["is_data_distributed"] = True
            setattr(self, _IS_GRADIENT_BUFFER, True)
        original(*bound.args, **bound.kwargs)

    return __init__


def reduce_grad_norm_over_instances(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_megatron_optimizer_based_on_param_groups``: HFSDP's norm is that of all shards.

    Upstream reduces it over one optimizer instance, which under HFSDP holds only some of the
    shards: instances have different norms and clip differently.
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
