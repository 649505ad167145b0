# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read the parameters and groups of a model of Megatron-FSDP, in both versions, or FSDP2.

Of v2 only placements and attributes are read. In Megatron-LM main of 2026-08-22 upstream's wrapper
has ZeRO-3 on one axis, with expert parallelism.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import copy_optimizer_param_metadata
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.tensor import DTensor

from megatron_muon.mcore.torch_fsdp2 import is_torch_fsdp2
from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v1, is_of_fsdp_v2, unsharded_of

# Megatron's wrapper: a torch.nn.Module with .module, in v1 a MegatronFSDP, and .ddp_config.
type FSDPModel = Any
# Attribute of gradient buffers that gradient_repairs.py has repaired.
IS_SHARDED = "_megatron_muon_is_sharded"
# A DTensor parameter with the attributes Megatron-FSDP sets on it (orig_param, ...).
type FSDPParameter = Any


def adapter_module(version: int) -> str:
    """Return the module with Megatron's wrapper of a version; later releases have two."""
    later = f"megatron.core.distributed.fsdp.mcore_adapter_v{version}"
    return later if find_spec(later) else "megatron.core.distributed.fsdp.mcore_fsdp_adapter"


def is_wrapped(chunk: torch.nn.Module) -> bool:
    """Return whether Megatron-FSDP wraps a model chunk."""
    # The classes and their modules have other names in later releases.
    return any(
        each.__module__.startswith("megatron.core.distributed.fsdp.mcore_")
        for each in type(chunk).__mro__
    )


def check_model_chunks(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Check that every model chunk is wrapped by Megatron-FSDP and holds its DTensor parameters.

    Args:
        model_chunks: Model chunks passed to ``get_megatron_optimizer``.

    Raises:
        TypeError: A chunk is not a ``FullyShardedDataParallel``, such as a model that a script
            passed to Megatron-FSDP v2 itself.
        ValueError: A chunk has run a forward pass, so that its parameters are the raw ones; it was
            wrapped before ``enable()``, and its gradients will be scaled wrongly; or FSDP2 shards
            other weights than main weights.
    """
    for index, chunk in enumerate(model_chunks):
        if not (is_wrapped(chunk) or is_torch_fsdp2(chunk)):
            raise TypeError(
                f"model_chunks[{index}]: expected megatron.core.distributed.fsdp."
                f"mcore_fsdp_adapter.FullyShardedDataParallel, got {type(chunk).__name__}. "
                "Wrap the model with --use-megatron-fsdp, or use megatron_muon.fsdp2.Muon."
            )
        # After a forward pass the module holds raw parameters until gradients are reduced.
        for name, param in chunk.named_parameters():
            if not isinstance(param, DTensor):
                raise ValueError(
                    f"{name}: expected a DTensor, got {type(param).__name__}. Build the optimizer "
                    "before the first forward pass."
                )
            if is_torch_fsdp2(chunk) and param.dtype != torch.float32:
                raise ValueError(
                    f"{name}: expected float32 shards, got {param.dtype}. Train in float32, or "
                    "with Megatron-LM's trainer, where modules gather float32 shards in bfloat16."
                )
        if not (is_v2(chunk) or is_torch_fsdp2(chunk)) and _has_unrepaired_gradients(chunk):
            raise ValueError(
                f"model_chunks[{index}]: expected a model that was wrapped in Megatron-FSDP after "
                "megatron_muon.enable(), which repairs its gradients, got one that was wrapped "
                "before. Call enable() first."
            )


def _has_unrepaired_gradients(chunk: FSDPModel) -> bool:
    """Return whether buffers were made without ``gradient_repairs``."""
    groups = chunk.param_and_grad_buffer.parameter_groups
    buffers = (group.main_grad_buffer for group in groups)
    return any(buffer is not None and not hasattr(buffer, IS_SHARDED) for buffer in buffers)


def named_optimizer_parameters(
    model_chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, FSDPParameter]]:
    """Yield the trainable parameters of all chunks with names free of wrapper prefixes."""
    for chunk in model_chunks:
        for name, param in sharded_parameters(sharded_module(chunk)).items():
            if param.requires_grad:
                yield name, param


def bare_name(name: str) -> str:
    """Return the name of a parameter without the prefixes of wrappers around the model."""
    return re.sub(r"^(module\.)+", "", name)


def current_device() -> torch.device:
    """Return the CUDA device of this rank; scripts/cpu_ranks replaces ``torch.cuda``."""
    return torch.device("cuda", torch.cuda.current_device())


def copy_parameter_attributes(param: FSDPParameter) -> None:
    """Copy the attributes that Megatron's optimizers read and Megatron-FSDP does not copy.

    One of them is ``allreduce``, False for experts under expert parallelism. Without it experts
    would be grouped, and their gradient norm reduced, as dense parameters.
    """
    if is_of_fsdp_v2(param):
        # v2 leaves all of them on the parameter that modules see.
        for name, value in vars(unsharded_of(param)).items():
            if not name.startswith("_"):
                setattr(param, name, value)
        mark(param)
        return
    if not is_of_fsdp_v1(param):
        mark(param)
        return
    copy_optimizer_param_metadata(param, param.orig_param)
    # An attribute of later releases of Megatron-LM, which Megatron-FSDP does not copy either.
    if hasattr(param.orig_param, "use_muon"):
        param.use_muon = param.orig_param.use_muon


def sharded_module(chunk: FSDPModel) -> Any:
    """Return the module with the sharded parameters: ``MegatronFSDP`` in v1, the wrapper in v2."""
    return chunk if is_v2(chunk) else chunk.module


def sharded_parameters(module: Any) -> dict[str, FSDPParameter]:
    """Return the parameters of a ``sharded_module()`` by their bare names, after a step too."""
    buffers = getattr(module, "param_and_grad_buffer", None)
    named = buffers.optimizer_named_parameters if buffers else module.named_parameters()
    return {bare_name(name): param for name, param in named}


def is_copy(param: torch.Tensor) -> bool:
    """Return whether a parameter is a copy of the embedding, which the first stage has too.

    The last stage has one if embeddings are tied, and so has a stage that predicts tokens.
    """
    # v2 leaves attributes on the parameter that modules see.
    marked: Any = unsharded_of(param) if is_of_fsdp_v2(param) else param  # type: ignore[arg-type]
    return bool(getattr(marked, "shared", False))


def is_sharded_over_instances(chunk: FSDPModel) -> bool:
    """Return whether all instances of the optimizer hold different shards, as under HFSDP."""
    ddp_config = chunk.ddp_config
    if ddp_config.num_distributed_optimizer_instances == 1:
        return False
    if not is_v2(chunk):
        return bool(ddp_config.outer_dp_sharding_strategy != "no_shard")
    # With several instances v2 may still shard over all data-parallel ranks.
    return all(
        placement.is_shard() for param in chunk.parameters() for placement in param.placements
    )


def grad_stats_group(
    chunk: FSDPModel, groups: ProcessGroupCollection, *, is_expert: bool
) -> dist.ProcessGroup:
    """Return the group over which gradient norm and zero count are reduced.

    It has all ranks that hold different shards: the model-parallel group for ``no_shard``, where
    gradients are whole on every rank; all instances under HFSDP; otherwise one instance.

    Args:
        chunk: A chunk of the model.
        groups: Process groups of the model.
        is_expert: True for gradients of expert parameters.

    Raises:
        RuntimeError: HFSDP does not span all ranks of the job.
    """
    if is_torch_fsdp2(chunk):
        return groups.dp_cp
    if chunk.ddp_config.data_parallel_sharding_strategy == "no_shard":
        return groups.tp_ep_pp if is_expert else groups.mp
    if not is_sharded_over_instances(chunk):
        return groups.intra_dist_opt
    num_ranks = dist.get_world_size(groups.intra_dist_opt) * dist.get_world_size(
        groups.inter_dist_opt
    )
    if num_ranks != dist.get_world_size():
        raise RuntimeError(
            f"HFSDP gradient norm: expected optimizer instances that span all "
            f"{dist.get_world_size()} ranks, got {num_ranks}. Give the whole job to one model."
        )
    # There is no group of all instances, but they span the job.
    return dist.group.WORLD  # type: ignore[return-value]


def is_v2(model: torch.nn.Module) -> bool:
    """Return whether Megatron-FSDP v2 shards a model."""
    return any(map(is_of_fsdp_v2, model.parameters()))


def mark(param: Any) -> None:
    """Mark a parameter as Megatron-FSDP v1 does: its gradient is a shard, to be counted once."""
    param.__fsdp_param__ = True
