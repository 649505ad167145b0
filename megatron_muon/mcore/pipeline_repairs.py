# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of pipeline parallelism under Megatron-FSDP, which megatron-core 0.19.2 lacks.

Without them no model with stages trains under Megatron-FSDP, with any optimizer.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_first_stage
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_attr_wrapped_model, get_pg_size
from torch.distributed.tensor import DTensor

from megatron_muon.rows.megatron_fsdp import own_rows, shard_group, tensor_shard_shape
from megatron_muon.runtime.tensors import local_tensor

# Elements. Source: megatron-core 0.19.2, the minimum of the method that is wrapped.
_LEAST_UNIT_SIZE = 1_000_000_000


def mesh_of_stage(original: Any, *groups: Any, ep_size: int = 1) -> torch.Tensor:
    """Wrap ``_get_dp_tp_mesh`` and ``_get_hsdp_tp_mesh``, which arrange all ranks of the job.

    A stage has some of them, and the factors do not multiply to their number: the model cannot be
    wrapped.

    Communication: with stages one gather of objects over each group of data-parallel ranks.
    """
    # Without stages upstream's arithmetic is right, and needs no collective.
    if ep_size * math.prod(group.size() for group in groups) == dist.get_world_size():
        return original(*groups, ep_size=ep_size)
    *outer, tp_group = groups
    ranks: Any = dist.get_process_group_ranks(tp_group)
    # The inner ranks first: each step adds an axis in front.
    for group in reversed(outer):
        gathered = [None] * group.size()
        dist.all_gather_object(gathered, ranks, group=group)
        ranks = gathered
    return torch.tensor(ranks)


def check_within_stage(
    original: Any, local_tensor: torch.Tensor, param: torch.Tensor, dist_index: Any, **kwargs: Any
) -> DTensor:
    """Wrap ``make_fsdp_dtensor``, whose check compares tensors of all ranks of the job.

    Torch's ``DTensor.from_local`` gathers over the job where tensor-parallel ranks are checked, and
    another stage has other parameters. With stages nothing is checked. Upstream does so by itself
    without tensor parallelism.
    """
    # The mesh of a stage is smaller than the job.
    if dist_index.device_mesh.size() < dist.get_world_size():
        kwargs["run_check"] = False
    return original(local_tensor, param, dist_index=dist_index, **kwargs)


def size_without_units(original: Any, self: Any) -> None:
    """Wrap ``MegatronFSDP._init_fsdp_param_and_grad_buffer``, which divides by the number of units.

    A stage without a layer, such as one of the output layer alone, has none, and fails under
    optim_grads_params.
    """
    units, config = tuple(self.fsdp_unit_modules), self.ddp_config
    if config.suggested_communication_unit_size is not None or any(
        isinstance(module, units) for module in self.module.modules()
    ):
        return original(self)
    # Upstream computes the size only if it is unset: with one there is nothing to divide.
    config.suggested_communication_unit_size = _LEAST_UNIT_SIZE
    try:
        original(self)
    finally:
        # All chunks of a rank share the configuration, and another one may have units.
        config.suggested_communication_unit_size = None


def free_views(original: Any, out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Wrap ``deallocate_output_tensor``, which asserts that the output of a stage is no view.

    The hooks of Megatron-FSDP return the output as a view of itself. The memory is freed if both
    tensors give it up.
    """
    base = getattr(out, "_base", None)
    # A view of another shape shares its base with other tensors: upstream's assertion stands.
    if deallocate_pipeline_outputs and base is not None and base.shape == out.shape:
        out.data = base.data = torch.empty((1,), device=out.device, dtype=out.dtype)
    else:
        original(out, deallocate_pipeline_outputs)


def sum_whole_gradients(
    original: Any,
    model: list[Any],
    embd_group: Any,
    pp_group: Any,
    weight_getter: Callable[[Any], Any],
    *rest: Any,
    **kwargs: Any,
) -> None:
    """Wrap ``_allreduce_embedding_grad``, which adds up shards of different rows.

    The first and the last stage both have a copy of a tied embedding, each sharded with the other
    parameters of its stage. Upstream adds the shards of the two ranks that correspond, although
    they hold other rows, or one of them none. Here the gradients of the copies are added, and each
    rank gets its rows of the sum.

    Communication: an all-reduce of the whole gradient over the shard group, twice the bytes of an
        all-gather of uneven rows, which would need padding; and one over the embedding group.
    Memory: until it returns the gradient of the tensor-parallel rank's embedding.
    """
    if not model[0].ddp_config.use_megatron_fsdp:
        original(model, embd_group, pp_group, weight_getter, *rest, **kwargs)
        return
    # The group may be None, whose size upstream counts as 1. Middle stages are not in it.
    ranks = dist.get_process_group_ranks(embd_group) if get_pg_size(embd_group) > 1 else ()
    if dist.get_rank() not in ranks:
        return
    chunk = model[0] if is_pp_first_stage(pp_group) else model[-1]
    weight = weight_getter(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True))
    if weight is None or not weight.requires_grad:
        return
    whole = torch.zeros(tensor_shard_shape(weight), dtype=weight.dtype, device=weight.device)
    rows = slice(*own_rows(weight))
    # A rank without rows has no gradient, but takes part in the collectives.
    if weight.grad is not None:
        whole[rows] = local_tensor(weight.grad)
    # First rows are summed with zeros, which changes no bit but the sign of a zero.
    for group in (shard_group(weight), embd_group):
        if group is not None:
            dist.all_reduce(whole, group=group)
    if weight.grad is not None:
        local_tensor(weight.grad).copy_(whole[rows])


def accept_stages(
    original: Any,
    config: Any,
    ddp_config: Any,
    module: torch.nn.Module,
    pg_collection: Any,
    disable_bucketing: bool,
) -> None:
    """Wrap ``FullyShardedDataParallelV2._validate_config``, which refuses pipeline stages.

    Everything else stays refused. A stage may have no experts, though others are sharded over
    expert-parallel ranks; that some have them is Megatron's own check. Of several stages on a rank
    Megatron turns bucketing off in all but the first one, which v2 refuses and does not have.
    """
    if config.pipeline_model_parallel_size > 1:
        # Upstream sees a model of this stage alone.
        config, pg_collection = copy.copy(config), copy.copy(pg_collection)
        config.pipeline_model_parallel_size, pg_collection.pp = 1, None
        if not any(isinstance(each, MoELayer) for each in module.modules()):
            # A stage of dense layers alone has nothing to shard over expert-parallel ranks.
            config.expert_model_parallel_size = 1
        disable_bucketing = False
    original(config, ddp_config, module, pg_collection, disable_bucketing)


def accept_chunks(original: Any, config: Any, model_chunks: list[Any]) -> None:
    """Wrap ``FullyShardedOptimizer._validate_config``, which refuses several stages on a rank.

    The optimizer itself handles any number of model chunks.
    """
    # The checks of a chunk hold for all: they have one configuration.
    original(config, model_chunks[:1])
