# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose matrices Megatron-FSDP shards: SOAP and others, and the base of Muon."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    EmergingOptimizerEntry,
)

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.megatron_fsdp import tensor_mesh
from megatron_muon.rows.parameters import PlannedParameter, over_tensor_ranks
from megatron_muon.runtime.agreement import first_line
from megatron_muon.step.muon_step import MuonSettings, MuonStep
from megatron_muon.step.owned_matrix import Build, registered_class
from megatron_muon.step.whole_matrix import WholeMatrixStep, whole_matrix_settings


def entry_of(name: str) -> EmergingOptimizerEntry:
    """Return the entry of an optimizer in Megatron's registry, which lacks some of its library's.

    Raises:
        ValueError: No optimizer has this name.
    """
    # Megatron refuses a name that its registry lacks, and routes parameters by the entry.
    if name not in _EMERGING_OPTIMIZERS:
        _EMERGING_OPTIMIZERS[name] = EmergingOptimizerEntry(optimizer_cls=registered_class(name))
    return _EMERGING_OPTIMIZERS[name]


class ShardedMatrices(torch.optim.Optimizer):
    """Base of optimizers of DTensor matrices, which are stepped through an exchange.

    Attributes:
        tensor_shards: Shard of every parameter on its tensor-parallel rank, with the boxes of
            ranks; see ``tensor_shard_of()``.
        params: Parameters, as at construction.
        device: Device of the shards. A pipeline stage may have no parameters.
        pg_collection: Process groups of the model.
        step_class: Class of the step.
    """

    tensor_shards: Mapping[torch.Tensor, PlannedParameter]
    params: list[Any]
    device: torch.device
    pg_collection: Any
    step_class: type[MuonStep] = MuonStep

    def planned(self, param: Any) -> PlannedParameter:
        """Return a parameter as the matrix that upstream steps: the shard of this tensor rank.

        It is whole over tensor parallelism where tensor-parallel ranks have copies, such as a
        router.
        """
        shard, group = self.tensor_shards[param], self.tensor_group(param)
        if group is None:
            return shard
        if self.is_tensor_sharded(param):
            # A checkpoint has one tensor for each name, and these ranks own different matrices.
            number = f"tensor rank {dist.get_rank(group)} of {dist.get_world_size(group)}."
            return replace(shard, state_prefix=number)
        mesh = tensor_mesh(param)
        # Stepped once, copies cannot drift apart.
        return shard if mesh is None else over_tensor_ranks(shard, mesh, None)

    def tensor_group(self, param: Any) -> dist.ProcessGroup | None:
        """Return the tensor-parallel group of a parameter; None where it is one rank."""
        is_expert, groups = getattr(param, "expert_tp", False), self.pg_collection
        if groups is None:
            return None
        group: dist.ProcessGroup | None = groups.expt_tp if is_expert else groups.tp
        return group if group is not None and dist.get_world_size(group) > 1 else None

    def is_tensor_sharded(self, param: Any) -> bool:
        """Return whether tensor-parallel ranks hold different shards of a parameter."""
        is_cut = getattr(param, "partition_dim", None) in (0, 1)
        return is_cut and self.tensor_group(param) is not None

    def problems(self) -> list[str]:
        """List settings that cannot work and parameters that cannot be stepped, as sentences."""
        problems = []
        for param in self.params:
            shard = self.tensor_shards[param]
            # The layout of the buffer tells which rows these are.
            if tuple(param._local_tensor.shape) != shard.local_shape:
                problems.append(
                    f"{shard.name}: expected a local shard of shape {shard.local_shape}, got "
                    f"{tuple(param._local_tensor.shape)}. Pass the layout the model was sharded by"
                )
            # A step updates main weights in place, in float32.
            if param.dtype != torch.float32:
                problems.append(
                    f"{shard.name}: expected a float32 main parameter, got {param.dtype}. Use "
                    "--megatron-fsdp-main-params-dtype fp32"
                )
        return problems

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Refuse to step: upstream's method would take this rank's rows for whole matrices."""
        raise RuntimeError(
            "step: expected a step of FSDPMuonChainedOptimizer, got one of a single optimizer. "
            "Step the optimizer that build_megatron_fsdp_emerging_optimizer returned."
        )


class FSDPWholeMatrixOptimizer(ShardedMatrices):
    """An optimizer of matrices, such as SOAP, over shards of Megatron-FSDP.

    The owner of a matrix steps the whole of it by the class, and keeps its state; see
    ``WholeMatrixStep``. A step equals a step of the class on the unsharded model. With tensor
    parallelism a matrix is the shard of a tensor-parallel rank, as it is upstream.

    Args:
        params: DTensor parameters or parameter groups, in the same order on all ranks.
        build: Builds an optimizer of the class, given parameter groups.
        description: The class and its arguments, for the comparison of ranks.
        tensor_shards: See ``ShardedMatrices``, as for the next two.
        device: Device of the shards.
        pg_collection: Process groups.

    Raises:
        ValueError: The class cannot be built.

    Memory: see ``WholeMatrixStep``.
    """

    step_class = WholeMatrixStep

    def __init__(
        self,
        params: Iterable[Any],
        build: Build,
        description: str,
        *,
        tensor_shards: Mapping[torch.Tensor, PlannedParameter],
        device: torch.device,
        pg_collection: Any,
    ) -> None:
        try:
            defaults = build([{"params": [torch.nn.Parameter(torch.ones(1, 1))]}]).defaults
        # Any error: other ranks are still in the constructor.
        except Exception as error:
            raise ValueError(f"{description}: {first_line(error)}") from error
        super().__init__(params, defaults)
        self._build, self._description = build, description
        self.tensor_shards, self.device, self.pg_collection = tensor_shards, device, pg_collection
        self.params = [param for group in self.param_groups for param in group["params"]]

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = False) -> None:
        """Create no state; ``WholeMatrixStep`` does."""

    def settings(
        self, exchange: ExchangeSettings, num_optimizers: int, *, gradients_stay: bool
    ) -> MuonSettings:
        """Return the settings of a step."""
        description = f"{self._description}, {num_optimizers} optimizers"
        return whole_matrix_settings(self._build, (), exchange, description)
