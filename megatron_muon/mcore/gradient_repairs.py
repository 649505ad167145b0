# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of gradients: scale, norm and fused accumulation.

The defects are in 0.19.2, and in Megatron-FSDP v2 of later releases. Adam hides errors of scale and
norm, as its update hardly changes when gradients are scaled. They matter for Muon, whose momentum
mixes gradients that were clipped or scaled differently.

With fusion, the backward pass of a linear layer adds the gradient of its weight to ``main_grad``,
or overwrites it. The sharding strategy decides which one is right:

==================================  ============================  ==============================
strategy                            ``main_grad``                 gradients must be
==================================  ============================  ==============================
``no_shard``, ``optim``             the buffer of the whole step  added
``optim_grads, _grads_params``      a bucket of one microbatch,   overwritten, as its memory is
                                    which is reduced and freed    not initialized; added if a
                                                                  weight is used again
==================================  ============================  ==============================
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer.optimizer import copy_optimizer_param_metadata
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.mcore import fsdp_model
from megatron_muon.mcore.fsdp_model import (
    IS_SHARDED,
    grad_stats_group,
    is_sharded_over_instances,
)
from megatron_muon.rows.megatron_fsdp import unsharded_of

_OUTER_REDUCTIONS = "_megatron_muon_outer_reductions"


def keep_gradient_scaling_factor(
    original: Any, dp_buffer: Any, inner_dp_group: Any, is_data_distributed: bool
) -> Any:
    """Wrap ``_create_hfsdp_helper_buffer``, which drops the gradient scaling factor.

    Gradients are reduced through the helper buffer: without the factor of 1 / dp they are dp times
    too large. Over one inner rank, the helper of gradients must be a sharded buffer for the reason
    that ``scale_each_microbatch_once()`` gives.
    """
    is_sharded = is_data_distributed or getattr(dp_buffer, IS_SHARDED, False)
    helper = original(dp_buffer, inner_dp_group, is_sharded)
    helper.gradient_scaling_factor = dp_buffer.gradient_scaling_factor
    return helper


def scale_each_microbatch_once(
    original: Any, self: Any, ddp_config: Any, params: Any, is_data_distributed: bool, **kwargs: Any
) -> None:
    """Wrap ``DataParallelBuffer.__init__``, whose gradients over one rank are scaled repeatedly.

    If gradients are sharded, every microbatch is reduced and added to its shard. Over a group of
    one rank (experts with as many expert-parallel as data-parallel ranks, or one inner rank under
    HSDP) upstream makes the buffer unsharded: microbatches accumulate in it, and every reduction
    multiplies all of it by 1 / dp again; with another communication dtype it even adds the buffer
    to itself. A sharded buffer of one shard is handled as in any other group.

    Only gradient buffers have the argument of a scaling factor, which may be None.

    Source: NVIDIA/Megatron-LM issue 6660 and pull request 6773, which came after 0.19.2.
    """
    if "gradient_scaling_factor" in kwargs:
        strategy = ddp_config.data_parallel_sharding_strategy
        setattr(self, IS_SHARDED, strategy in ("optim_grads", "optim_grads_params"))
        is_data_distributed = is_data_distributed or getattr(self, IS_SHARDED)
    original(self, ddp_config, params, is_data_distributed=is_data_distributed, **kwargs)


def count_outer_reductions(
    original: Any, self: Any, bucket_group: list[int], *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``GradReducePipeline._bucket_group_gradient_reduce`` to count reductions of HSDP.

    Gradients are reduced over the outer ranks only in the backward pass of a microbatch that
    ``config.no_sync_func`` marks as the last one. If none is marked, replicas drift; if two are,
    gradients are summed twice. Upstream notices neither.
    """
    if kwargs.get("outer_fsdp_group_grad_reduce"):
        vars(self).setdefault(_OUTER_REDUCTIONS, Counter()).update(bucket_group)
    return original(self, bucket_group, *args, **kwargs)


def take_outer_reductions(chunk: Any) -> set[int]:
    """Return how often gradient buckets were reduced over the outer ranks since the last call."""
    counts = vars(chunk.module.grad_reduce_pipeline).pop(_OUTER_REDUCTIONS, Counter())
    groups = chunk.param_and_grad_buffer.parameter_groups
    return {
        counts[index] for index, group in enumerate(groups) if group.main_grad_buffer is not None
    }


def reduce_grad_norm_over_instances(
    original: Any, config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``_get_megatron_optimizer_based_on_param_groups``: the norm covers all shards.

    Upstream reduces it over one optimizer instance, which under HFSDP holds only some of the
    shards: instances have different norms and clip differently. v2 reduces the norm over the
    data-parallel ranks of one pipeline stage, and so stages differ.
    """
    optimizer, chunk = original(config, model_chunks, *args, **kwargs), model_chunks[0]
    if not getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False):
        return optimizer
    is_v2 = fsdp_model.is_v2(chunk)
    # Pull request 6489: each rank's part is divided by the number of its copies, and the sum
    # covers all ranks.
    is_complete = is_v2 and "get_grad_norm" in vars(type(optimizer))
    if not is_complete and (is_v2 or is_sharded_over_instances(chunk)):
        groups = kwargs.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
        optimizer.grad_stats_parallel_group = grad_stats_group(chunk, groups, is_expert=False)
    return optimizer


def count_shards_once(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``FullyShardedOptimizer.__init__``: gradients of v2 are counted once in norm and zeros.

    Upstream sums norm and count over the mesh of DTensors, and then over the data-parallel ranks,
    which are the same: the norm is sqrt(dp) times too large, and clipping follows it. With expert
    parallelism it asserts that there is one mesh. Gradients of v1 are counted as local shards, by a
    mark on their parameters.
    """
    original(self, *args, **kwargs)
    for param in self.get_parameters():
        # One copy of a tied embedding is not counted.
        copy_optimizer_param_metadata(param, unsharded_of(param))
        fsdp_model.mark(param)


def count_each_backward_pass(original: Any, self: Any) -> None:
    """Wrap ``FsdpContext.register_post_backward_final_callback``, which begins a backward pass.

    v2 reduces the gradients of a module once all its parameters have one, and counts them from zero
    after a forward pass alone. Of two backward passes in a row, as at the end of a schedule with
    pipeline stages, the second one would reduce nothing.
    """
    # The root, which calls this, is the first module of a backward pass.
    for module in self.forward_order:
        module._num_ready_grad_parameters = 0
    original(self)


def overwrite_only_buckets(
    original: Any, self: Any, params: Sequence[Any], *args: Any, **kwargs: Any
) -> None:
    """Wrap ``MegatronFSDP.all_gather_and_wait_parameters_ready``, which marks every weight.

    The mark, ``overwrite_main_grad``, tells Transformer Engine to overwrite. Upstream sets it for
    ``optim`` too: every microbatch overwrites the one before, and only the last one trains.
    ``no_shard`` never reaches that line.

    Source: NVIDIA/Megatron-LM pull request 6357, which came after 0.19.2.
    """
    original(self, params, *args, **kwargs)
    # Unset after each call, as upstream marks in every forward and backward pass.
    if self.data_parallel_sharding_strategy == "optim":
        for param in params:
            param.overwrite_main_grad = False


def keep_mark_of_grouped_experts(original: Any, linear_module: Any) -> None:
    """Wrap ``TEGroupedMLP._ensure_main_grad``, which sets the mark again, for ``optim`` too.

    It runs after Megatron-FSDP's hooks, before Transformer Engine's fused operations.
    """
    marked = [
        (param, param.overwrite_main_grad)
        for param in linear_module.parameters(recurse=False)
        if hasattr(param, "overwrite_main_grad")
    ]
    original(linear_module)
    for param, mark in marked:
        param.overwrite_main_grad = mark


def fuse_only_into_buckets(
    original: Any, ctx: Any, input: Any, weight: Any, bias: Any, is_fused: bool, *rest: Any
) -> Any:
    """Wrap ``forward`` of Megatron's own linear layer, whose backward pass always overwrites.

    Under Megatron-FSDP it ignores the mark. Transformer Engine's models have this layer too, as
    output layer. Without fusion the gradient is returned to autograd, which sums all uses of a
    weight, and Megatron-FSDP adds it to ``main_grad``, at the cost of the memory of one gradient.

    Forward decides, as backward would unpack the saved weight a second time, which torch's
    activation checkpointing refuses.
    """
    # Other wrappers than Megatron-FSDP initialize ``main_grad``.
    if hasattr(weight, "__fsdp_param__"):
        is_fused = is_fused and _may_be_overwritten(weight)
    return original(ctx, input, weight, bias, is_fused, *rest)


def _may_be_overwritten(weight: Any) -> bool:
    """Return whether ``main_grad`` of a weight holds no gradient when its only one is written."""
    config = getattr(weight._megatron_fsdp_model.module, "config", None)
    return bool(
        getattr(weight, "overwrite_main_grad", False)
        # Upstream's mark of an embedding that is also the output layer. After a fused write
        # Megatron-FSDP deletes ``.grad``, and with it the embedding's part.
        and not getattr(weight, "zero_out_wgrad", False)
        # Multi-token prediction uses the output layer several times.
        and not getattr(config, "mtp_num_layers", None)
    )
