# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Build the optimizer of a sharded model that ``OptimizerConfig.optimizer`` asks for."""

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    _default_adam_based_eopt_config_to_kwargs,
)
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import log_single_rank

from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer
from megatron_muon.mcore.fsdp_model import (
    FSDPModel,
    FSDPParameter,
    check_model_chunks,
    copy_parameter_attributes,
    current_device,
    grad_stats_group,
    is_v2,
    is_wrapped,
    named_optimizer_parameters,
)
from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.mcore.options import MuonOptions
from megatron_muon.mcore.patching import PATCHED
from megatron_muon.mcore.sharded_matrices import FSDPWholeMatrixOptimizer, ShardedMatrices, entry_of
from megatron_muon.mcore.splits import routing_rule, tag_blocks
from megatron_muon.mcore.torch_fsdp2 import is_torch_fsdp2
from megatron_muon.mcore.unsupported import MUON_OPTIMIZERS, raise_where_refused
from megatron_muon.mcore.versions import IncompatibleMegatronError
from megatron_muon.plan.layout import Splits
from megatron_muon.rows.megatron_fsdp import tensor_shard_shape
from megatron_muon.rows.parameters import PlannedParameter, tensor_shard_of
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.step.dependencies import environment_problems
from megatron_muon.step.lion import FSDPLion

logger = logging.getLogger(__name__)

# Values that are equal where their texts are.
_COMPARED = (bool, int, float, str, tuple, torch.dtype)
# Arguments of a DistributedOptimizer that it does not read under Megatron-FSDP.
_NOT_READ = dict.fromkeys(
    (
        "per_model_buffers",
        "data_parallel_group",
        "data_parallel_group_gloo",
        "data_parallel_group_idx",
        "distributed_optimizer_instance_id",
    )
)


def build_megatron_fsdp_emerging_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[FSDPModel],
    config_overrides: dict[ParamKey, Any] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> FSDPMuonChainedOptimizer:
    """Build Muon, or another optimizer of matrices, over the parameters of a sharded model.

    Parameters go where Megatron's own rule sends them without Megatron-FSDP: embeddings, the output
    layer and tensors that are not 2-D to ``config.muon_scalar_optimizer`` (to Adam, beside another
    optimizer than Muon), everything else to the optimizer that ``config.optimizer`` names.

    Args:
        config: Optimizer configuration; the ``muon_*`` fields have the same meaning as under DDP.
            ``muon_momentum`` is 0.95 by default, Megatron's flag ``--muon-momentum`` 0.9. The
            optimizer ``dist_muon`` becomes ``muon``. Attributes with the names of ``MuonOptions``
            are read, which trainers set by flags or YAML, and a script like any attribute.
        model_chunks: Model chunks wrapped by Megatron-FSDP, or by Megatron in PyTorch's FSDP2; not
            run forward yet.
        config_overrides: Per-parameter settings, such as no weight decay for norms; kept, and
            completed by the rule for matrices. The dictionary is not changed.
        pg_collection: Process groups of the model; None for ``parallel_state``'s.

    Returns:
        The optimizer, with state for every parameter on every rank.

    Raises:
        ValueError: A setting is refused, or the model was run forward or wrapped before
            ``enable()``.
        TypeError: A model chunk is not wrapped so.
        RuntimeError: On all ranks: a shard is not as Megatron-FSDP makes it, ranks disagree about
            the parameters, or one of them chooses kernels by timing or has no memory for the
            exchange.

    Communication: parameter groups and layouts are compared once across ranks.
    """
    PATCHED.update()
    check_model_chunks(model_chunks)
    if is_v2(model_chunks[0]) and PATCHED.v2_problems:
        raise IncompatibleMegatronError(PATCHED.v2_problems)
    if config.optimizer == "dist_muon":
        # Bridge's recipes say so; Megatron-FSDP has already sharded what the prefix would. In
        # place: a trainer may set attributes of its configuration later.
        config.optimizer = "muon"
    options = MuonOptions.of(config)
    _check_settings(config, model_chunks[0], options)
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()

    fqns = {param: fqn for fqn, param in named_optimizer_parameters(model_chunks)}
    _tag_parameters(config, fqns, model_chunks, options.splits)
    # The rule comes last: it decides which optimizer steps a parameter.
    rule = routing_rule(config, skips_router=options.moe_router_skip_muon)
    param_groups: defaultdict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    overrides = {**(config_overrides or {}), **rule}
    # Some may be empty: all pipeline stages have the same groups and reduce norms together.
    for group in mcore_optimizer._get_param_groups(list(model_chunks), config, overrides):
        name = group.get("optimizer", config.optimizer)
        param_groups[name, group["is_expert_parallel"]].append(group)
    tensor_shards, problems = {}, environment_problems()
    # Lion has no matrices.
    for param, fqn in fqns.items() if config.optimizer != "lion" else ():
        # Ranks have different parameters.
        try:
            if param.dim() == 2:
                tensor_shards[param] = tensor_shard_of(PlannedParameter(fqn, param, param))
        except ValueError as error:
            problems.append(f"{fqn}: {error}")
    raise_where_any_rank_fails(problems, None, current_device(), "No optimizer was built.")
    children = _ChildBuilder(config, options, list(model_chunks), pg_collection, tensor_shards)
    _log_routing(config, param_groups)
    return FSDPMuonChainedOptimizer(
        [children.build(*key, groups) for key, groups in param_groups.items()],
        model_chunks,
        fqns,
        options.exchange,
        log_metrics=options.muon_fsdp_log_metrics,
        offload_fraction=config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0,
    )


def _check_settings(config: OptimizerConfig, chunk: FSDPModel, options: MuonOptions) -> None:
    """Refuse settings that differ between ranks, then those that cannot work, on all ranks."""
    shared = {**vars(chunk.ddp_config), **vars(config)}
    raise_where_ranks_differ(
        [f"{k} {v}" for k, v in sorted(shared.items()) if v is None or isinstance(v, _COMPARED)],
        None,
        current_device(),
        "settings of the optimizer and of gradients",
        "Build the same configuration on every rank.",
    )
    settings = {**vars(chunk.config), **shared, "use_torch_fsdp2": is_torch_fsdp2(chunk)}
    raise_where_refused(settings, more=options.unread_by(config.optimizer))


def choose_builder(
    original: Any, config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``_get_megatron_emerging_optimizer`` to build ours for sharded models."""
    is_ours = any(is_wrapped(c) or is_v2(c) or is_torch_fsdp2(c) for c in model_chunks)
    build = build_megatron_fsdp_emerging_optimizer if is_ours else original
    return build(config, model_chunks, *args, **kwargs)


def _tag_parameters(
    config: OptimizerConfig,
    fqns: dict[FSDPParameter, str],
    model_chunks: Sequence[FSDPModel],
    splits: Splits,
) -> None:
    """Mark experts and blocks, as upstream does before it builds an emerging optimizer."""
    for param, fqn in fqns.items():
        copy_parameter_attributes(param)
        if "experts" in fqn and "shared" not in fqn:
            param.expert_tp = True
    # Others than Muon step whole matrices.
    for chunk in model_chunks if config.optimizer in MUON_OPTIMIZERS else ():
        tag_blocks(chunk, splits, lambda param: tensor_shard_shape(param)[0])


@dataclass
class _ChildBuilder:
    """Builds the optimizers of a chain."""

    config: OptimizerConfig
    options: MuonOptions
    model_chunks: list[FSDPModel]
    groups: ProcessGroupCollection
    tensor_shards: dict[torch.Tensor, PlannedParameter]

    def build(
        self, name: str, is_expert: bool, param_groups: list[dict[str, Any]]
    ) -> MegatronOptimizer:
        """Build the optimizer of one name, for experts or for dense parameters."""
        if name == "lion":
            child = self._wrapped(self._lion(param_groups))
        elif name in MUON_OPTIMIZERS:
            child = self._wrapped(self._muon(param_groups))
        elif name == self.config.optimizer:
            child = self._wrapped(self._whole(param_groups))
        else:
            child = self._scalar(name, param_groups)
        child.grad_stats_parallel_group = grad_stats_group(
            self.model_chunks[0], self.groups, is_expert=is_expert
        )
        return child

    def _muon(self, param_groups: list[dict[str, Any]]) -> FSDPZeROTensorParallelMuon:
        config = self.config
        to_kwargs = _EMERGING_OPTIMIZERS[config.optimizer].config_to_kwargs
        kwargs = to_kwargs(config, self.model_chunks, self.groups)
        # Later releases pass on --muon-use-syrk, which is refused.
        kwargs.pop("use_syrk", None)
        # Only tags decide about splits: with --muon-no-split-qkv gate and up may still be.
        kwargs["split_qkv"] = True
        return FSDPZeROTensorParallelMuon(
            param_groups,
            tensor_shards=self.tensor_shards,
            device=current_device(),
            momentum_dtype=self.options.momentum_dtype,
            offload_state=self.config.optimizer_cpu_offload,
            **kwargs,
        )

    def _whole(self, param_groups: list[dict[str, Any]]) -> FSDPWholeMatrixOptimizer:
        config, entry = self.config, entry_of(self.config.optimizer)
        if entry.config_to_kwargs is not None:
            kwargs = entry.config_to_kwargs(config, self.model_chunks, self.groups)
        else:
            kwargs = _default_adam_based_eopt_config_to_kwargs(
                config.optimizer, config, self.model_chunks, self.groups
            )
            # Upstream passes them to classes that have none.
            if "betas" not in inspect.signature(entry.optimizer_cls).parameters:
                del kwargs["betas"]
        return FSDPWholeMatrixOptimizer(
            param_groups,
            lambda groups: entry.optimizer_cls(groups, **kwargs),
            f"--optimizer {config.optimizer} {kwargs}",
            tensor_shards=self.tensor_shards,
            device=current_device(),
            pg_collection=self.groups,
        )

    def _lion(self, param_groups: list[dict[str, Any]]) -> FSDPLion:
        config = self.config
        # As upstream: --lion-beta1 and --lion-beta2 belong to Lion beside another optimizer.
        prefix = "adam" if config.optimizer == "lion" else "lion"
        betas = tuple(getattr(config, f"{prefix}_beta{number}") for number in (1, 2))
        return FSDPLion(param_groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay)

    def _wrapped(self, inner: ShardedMatrices | FSDPLion) -> MegatronOptimizer:
        # The same for all optimizers of emerging-optimizers: it calls _init_group.
        init_state = _EMERGING_OPTIMIZERS["muon"].init_state_fn
        arguments = (inner, self.config, None, init_state, self.model_chunks)
        child: MegatronOptimizer
        if is_torch_fsdp2(self.model_chunks[0]):
            child = FP32Optimizer(inner, self.config, init_state)
        elif is_v2(self.model_chunks[0]):
            # Releases lack it.
            from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer

            child = FullyShardedOptimizer(*arguments)
        else:
            child = DistributedOptimizer(*arguments, **_NOT_READ)
        child.tp_group = self.groups.tp
        child.expert_tp_group = self.groups.expt_tp or self.groups.tp
        return child

    def _scalar(self, name: str, param_groups: list[dict[str, Any]]) -> MegatronOptimizer:
        scalar_config = copy.copy(self.config)
        scalar_config.optimizer = name
        # Upstream's would step copies of the parameters.
        scalar_config.optimizer_cpu_offload = False
        is_v1 = not (is_v2(self.model_chunks[0]) or is_torch_fsdp2(self.model_chunks[0]))
        # Only with it does Megatron wrap the optimizer as a DistributedOptimizer; others refuse it.
        scalar_config.use_distributed_optimizer = is_v1
        child = mcore_optimizer._get_megatron_optimizer_based_on_param_groups(
            config=scalar_config,
            model_chunks=self.model_chunks,
            param_groups=param_groups,
            model_parallel_group=self.groups.mp,
            pg_collection=self.groups,
        )
        # A chain asserts one configuration; the inner optimizer was chosen by scalar_config above.
        child.config = self.config
        if not is_v1 and type(child.optimizer).__name__ == "FusedAdam":
            # Transformer Engine's may skip updates of a group that ends in an empty shard. Source:
            # issue 3207 of NVIDIA/TransformerEngine.
            for group in child.optimizer.param_groups:
                group["params"].sort(key=lambda param: param._local_tensor.numel() > 0)
        return child


def _log_routing(config: OptimizerConfig, param_groups: Mapping[tuple[str, bool], Any]) -> None:
    """Log on rank 0 how many parameters every optimizer was given."""
    parts = [
        f"{name} steps {sum(len(group['params']) for group in groups)} "
        f"{'expert' if is_expert else 'dense'} parameters"
        for (name, is_expert), groups in param_groups.items()
    ]
    text = "%s, this rank's model-parallel part: %s"
    log_single_rank(logger, logging.INFO, text, config.optimizer, ", ".join(parts))
    if config.optimizer == "adaptive_muon" and config.adaptive_muon_moment2_method != "adamuon":
        log_single_rank(
            logger,
            logging.WARNING,
            "%s: results are scaled once, as in emerging-optimizers 0.3.0; Megatron-LM main of "
            "2026-08-22 scales them twice",
            config.adaptive_muon_moment2_method,
        )
