# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Build the optimizer of a Megatron-FSDP model for each ``OptimizerConfig.optimizer`` we have."""

import copy
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    _adaptive_muon_config_to_kwargs,
    _muon_config_to_kwargs,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import log_single_rank

from megatron_muon.mcore.adaptive.methods import adaptive_muon
from megatron_muon.mcore.arguments import requested_exchange, requested_splits
from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer
from megatron_muon.mcore.fsdp_model import (
    FSDPModel,
    FSDPParameter,
    check_model_chunks,
    copy_parameter_attributes,
    describe_matrix,
    grad_stats_group,
    named_optimizer_parameters,
    num_rows,
)
from megatron_muon.mcore.lion import FSDPLion
from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.mcore.routing import routing_rule
from megatron_muon.mcore.splits import tag_blocks
from megatron_muon.mcore.unsupported import raise_where_unsupported
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.splits import Splits
from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.sharded_matrix import ShardedMatrix

logger = logging.getLogger(__name__)


def build_megatron_fsdp_emerging_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[FSDPModel],
    config_overrides: dict[ParamKey, Any] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    *,
    exchange: ExchangeSettings | None = None,
    splits: Splits | None = None,
) -> FSDPMuonChainedOptimizer:
    """Build Muon and its scalar optimizer over the DTensor parameters of a Megatron-FSDP model.

    Parameters go where Megatron's own rule sends them without Megatron-FSDP: embeddings, the output
    layer and whatever is not 2-D to ``config.muon_scalar_optimizer``, everything else to Muon.

    Args:
        config: Optimizer configuration; the ``muon_*`` fields mean what they do under DDP.
        model_chunks: Model chunks wrapped by Megatron-FSDP, not run forward yet.
        config_overrides: Per-parameter settings, such as no weight decay for norms; kept, and
            completed by the rule for matrices. The dictionary is not changed.
        pg_collection: Process groups of the model; None for ``parallel_state``'s.
        exchange: Who orthogonalizes what, and what travels; None for what the ``--muon-fsdp-*``
            flags say, or their defaults in scripts without them.
        splits: What is orthogonalized apart; None for what ``config.muon_split_qkv`` and the
            ``--muon-split-*`` flags say.

    Returns:
        The optimizer, with state for every parameter on every rank.

    Raises:
        ValueError: A setting is refused, or the model was run forward or wrapped before
            ``enable()``.
        TypeError: A model chunk is not wrapped by Megatron-FSDP.
        RuntimeError: On all ranks: a shard is not as Megatron-FSDP makes it, ranks disagree about
            the parameters, or one of them has no memory for the exchange.

    Communication: parameter groups and layouts are compared once across ranks.
    """
    check_model_chunks(model_chunks)
    raise_where_unsupported(_settings(config, model_chunks[0]))
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()

    fqns = {param: fqn for fqn, param in named_optimizer_parameters(model_chunks)}
    _tag_parameters(config, fqns, model_chunks, splits)

    # The rule comes last: it decides which optimizer steps a parameter.
    overrides = {**(config_overrides or {}), **routing_rule(config)}
    groups_by_child: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for group in mcore_optimizer._get_param_groups(list(model_chunks), config, overrides):
        if group["params"]:
            name = group.get("optimizer", config.optimizer)
            groups_by_child[name, group["is_expert_parallel"]].append(group)

    children: dict[tuple[str, bool], DistributedOptimizer] = {}
    muon: FSDPZeROTensorParallelMuon | None = None
    # Experts first: the optimizer of the dense matrices plans both.
    for name, is_expert in sorted(groups_by_child, key=lambda key: not key[1]):
        groups = groups_by_child[name, is_expert]
        if name == config.optimizer and name != "lion":
            muon = _inner_muon(
                config,
                groups,
                model_chunks,
                pg_collection,
                fqns,
                exchange=exchange or requested_exchange(),
                experts=muon,
                is_stepped_first=is_expert and (name, False) in groups_by_child,
            )
            child = _wrapped(muon, config, model_chunks, pg_collection)
        elif name == "lion":
            child = _wrapped(_inner_lion(config, groups), config, model_chunks, pg_collection)
        else:
            child = _scalar_child(config, name, groups, model_chunks, pg_collection)
        child.grad_stats_parallel_group = grad_stats_group(
            model_chunks[0].ddp_config, pg_collection, is_expert=is_expert
        )
        children[name, is_expert] = child
    _log_routing(config, groups_by_child, fqns)
    return FSDPMuonChainedOptimizer([children[key] for key in groups_by_child], model_chunks, fqns)


def _settings(config: OptimizerConfig, chunk: FSDPModel) -> dict[str, Any]:
    """Merge the configurations of model, wrapper and optimizer into one table of settings."""
    settings = {
        field.name: getattr(part, field.name)
        for part in (chunk.config, chunk.ddp_config, config)
        for field in dataclasses.fields(part)
    }
    # The configurations name the dtype of main parameters; bf16 there is the model's.
    settings["bf16"] = settings["bf16"] or settings["params_dtype"] == torch.bfloat16
    return settings


def _tag_parameters(
    config: OptimizerConfig,
    fqns: dict[FSDPParameter, str],
    model_chunks: Sequence[FSDPModel],
    splits: Splits | None,
) -> None:
    """Mark experts and blocks, as upstream does before it builds an emerging optimizer."""
    for param, fqn in fqns.items():
        copy_parameter_attributes(param)
        if "experts" in fqn and "shared" not in fqn:
            param.expert_tp = True
    # Lion is elementwise.
    for chunk in model_chunks if config.optimizer != "lion" else ():
        tag_blocks(chunk, splits or requested_splits(config), num_rows)


def _inner_muon(
    config: OptimizerConfig,
    groups: list[dict[str, Any]],
    model_chunks: Sequence[FSDPModel],
    pg_collection: ProcessGroupCollection,
    fqns: dict[FSDPParameter, str],
    *,
    exchange: ExchangeSettings,
    experts: FSDPZeROTensorParallelMuon | None,
    is_stepped_first: bool,
) -> FSDPZeROTensorParallelMuon:
    matrices: dict[torch.Tensor, ShardedMatrix] = {}
    problems = []
    # Errors are collected: ranks see different parameters, and all must stop together.
    for param in (param for group in groups for param in group["params"]):
        try:
            matrices[param] = describe_matrix(fqns[param], param)
        except (RuntimeError, ValueError) as error:
            problems.append(str(error))
    raise_where_any_rank_fails(
        problems, None, model_chunks[0].module.device, "No optimizer was built."
    )
    muon: type[FSDPZeROTensorParallelMuon] = FSDPZeROTensorParallelMuon
    kwargs = _muon_config_to_kwargs(config, model_chunks, pg_collection)
    if config.optimizer == "adaptive_muon":
        kwargs = _adaptive_muon_config_to_kwargs(config, model_chunks, pg_collection)
        muon = adaptive_muon(kwargs.pop("moment2_method"))
    # Later releases pass on --muon-use-syrk, which has chosen a backend by now.
    kwargs.pop("use_syrk", None)
    return muon(
        groups,
        matrices=matrices,
        exchange=exchange,
        experts=experts,
        is_stepped_first=is_stepped_first,
        # Tags alone say what is split: with --muon-no-split-qkv gate and up may still be.
        **{**kwargs, "split_qkv": True},
    )


def _inner_lion(config: OptimizerConfig, groups: list[dict[str, Any]]) -> FSDPLion:
    # As upstream: --lion-beta1 and --lion-beta2 are those of Lion beside another optimizer.
    is_alone = config.optimizer == "lion"
    return FSDPLion(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2)
        if is_alone
        else (config.lion_beta1, config.lion_beta2),
        weight_decay=config.weight_decay,
    )


def _wrapped(
    inner: FSDPZeROTensorParallelMuon | FSDPLion,
    config: OptimizerConfig,
    model_chunks: Sequence[FSDPModel],
    pg_collection: ProcessGroupCollection,
) -> DistributedOptimizer:
    child = DistributedOptimizer(
        inner,
        config,
        None,
        # Of any optimizer of emerging-optimizers: it calls _init_group.
        _EMERGING_OPTIMIZERS["muon"].init_state_fn,
        model_chunks=list(model_chunks),
        per_model_buffers=None,
        data_parallel_group=pg_collection.dp_cp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=dist.get_rank(pg_collection.mp),
        distributed_optimizer_instance_id=_instance_id(model_chunks, pg_collection),
    )
    child.tp_group = pg_collection.tp
    child.expert_tp_group = pg_collection.expt_tp or pg_collection.tp
    return child


def _scalar_child(
    config: OptimizerConfig,
    name: str,
    groups: list[dict[str, Any]],
    model_chunks: Sequence[FSDPModel],
    pg_collection: ProcessGroupCollection,
) -> DistributedOptimizer:
    scalar_config = copy.copy(config)
    scalar_config.optimizer = name
    # Only with it does Megatron wrap the optimizer as a DistributedOptimizer.
    scalar_config.use_distributed_optimizer = True
    child = mcore_optimizer._get_megatron_optimizer_based_on_param_groups(
        config=scalar_config,
        model_chunks=list(model_chunks),
        param_groups=groups,
        model_parallel_group=pg_collection.mp,
        data_parallel_group=pg_collection.dp_cp,
        data_parallel_group_idx=dist.get_rank(pg_collection.mp),
        distributed_optimizer_instance_id=_instance_id(model_chunks, pg_collection),
        pg_collection=pg_collection,
    )
    # A chain asserts one configuration; the inner optimizer was chosen by scalar_config above.
    child.config = config
    return child


def _instance_id(model_chunks: Sequence[FSDPModel], pg_collection: ProcessGroupCollection) -> int:
    if model_chunks[0].ddp_config.num_distributed_optimizer_instances == 1:
        return 0
    return dist.get_rank(pg_collection.inter_dist_opt)


def _log_routing(
    config: OptimizerConfig,
    groups_by_child: dict[tuple[str, bool], list[dict[str, Any]]],
    fqns: dict[FSDPParameter, str],
) -> None:
    """Log on rank 0 how many parameters and elements each optimizer was given, and why."""
    parts = []
    for (name, is_expert), groups in groups_by_child.items():
        params = [param for group in groups for param in group["params"]]
        is_rest = name != config.optimizer
        reason = "embedding, output layer or not 2-D" if is_rest else "2-D weights"
        parts.append(
            f"{name}: {len(params)} {'expert' if is_expert else 'dense'} parameters, "
            f"{sum(param.orig_param.numel() for param in params):,} elements ({reason})"
        )
    log_single_rank(
        logger,
        logging.INFO,
        "%s under Megatron-FSDP, this rank's model-parallel part: %s; %d parameters in all",
        "Lion" if config.optimizer == "lion" else "Muon",
        "; ".join(parts),
        len(fqns),
    )
