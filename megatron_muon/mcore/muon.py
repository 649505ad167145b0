# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon over the row shards of Megatron-FSDP, as an optimizer of Megatron's."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_muon.mcore.sharded_matrices import FSDPWholeMatrixOptimizer, ShardedMatrices
from megatron_muon.newton_schulz.settings import coefficients_of
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.parameters import PlannedParameter, over_tensor_ranks
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import scale_function
from megatron_muon.step.muon_step import MuonSettings, MuonStep
from megatron_muon.step.second_moments import method_problems, muon_settings
from megatron_muon.step.whole_matrix import WholeMatrixStep
from megatron_muon.user_errors import in_flags, naming_flags

_ARGUMENTS = frozenset(
    "lr momentum nesterov weight_decay use_decoupled_weight_decay split_qkv is_qkv_fn "
    "qkv_split_shapes fp32_matmul_prec coefficient_type num_ns_steps scale_mode extra_scale_factor "
    "pg_collection tp_mode".split()
)


class FSDPZeROTensorParallelMuon(ShardedMatrices, TensorParallelMuon):
    """Muon for DTensor parameters whose rows Megatron-FSDP shards over data-parallel ranks.

    ``build_muon_step()`` builds its step: the momentum of this rank's rows is updated, whole
    matrices are orthogonalized, and this rank's rows of the results are subtracted. A step equals
    a step of ``TensorParallelMuon`` on the unsharded model, because momentum, Nesterov and weight
    decay are elementwise.

    Parameters that every rank holds whole (``no_shard``) are stepped by this class too: the parent
    would pass a DTensor to Newton-Schulz, whose ``shape`` is global to tensor parallelism.

    Args:
        params: DTensor parameters or parameter groups, in the same order on all ranks.
        tensor_shards: Shard of every parameter on its tensor-parallel rank, with the boxes of
            ranks; see ``tensor_shard_of()``.
        device: Device of the shards; None for the parameters' own. A pipeline stage may have no
            parameters.
        momentum_dtype: bfloat16 halves the memory of momentum, which a step averages in float32 and
            rounds once.
        offload_state: Whether state is in CPU memory between steps.
        moment2_method: ``adamuon``, ``normuon`` or ``namo``: results are divided by a second
            moment, as emerging-optimizers' ``AdaptiveMuon`` does with every block as a parameter.
            adamuon is ``TensorParallelAdaptiveMuon`` of Megatron-LM main: an update is scaled by
            the tensor-parallel-local shape of its parameter, also before it is divided. None: Muon.
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.
        **muon_kwargs: Arguments of ``TensorParallelMuon``.

    Elementwise operations of a step run over few long tensors: Megatron-FSDP keeps the
    weights and the gradients of a unit in one buffer each, and the momentum has the same order.

    Memory: one momentum element per local parameter element, all of a parameter group in one
        allocation. With normuon the owner of a matrix has a number per row or column, with namo it
        has all state. Gradients are overwritten: their memory serves as scratch, and holds the
        update in the end. A copy of them would need as much memory as the momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        tensor_shards: Mapping[torch.Tensor, PlannedParameter],
        device: torch.device | None = None,
        momentum_dtype: torch.dtype = torch.float32,
        offload_state: bool = False,
        moment2_method: str | None = None,
        beta2: float = 0.95,
        eps: float = 1e-8,
        **muon_kwargs: Any,
    ) -> None:
        self.momentum_dtype, self.offload_state = momentum_dtype, offload_state
        # Upstream would take it, and this class would ignore it.
        if unknown := sorted(muon_kwargs.keys() - _ARGUMENTS):
            raise ValueError(
                f"{', '.join(unknown)}: expected arguments of Muon in the tested releases "
                "(docs/support.md), got others. Install one of these releases."
            )
        super().__init__(params, **muon_kwargs)
        # Upstream keeps some of these in a closure.
        bound = inspect.signature(TensorParallelMuon).bind(params, **muon_kwargs)
        bound.apply_defaults()
        self.arguments = bound.arguments
        self.scale = scale_function(
            self.arguments["scale_mode"], self.arguments["extra_scale_factor"]
        )
        self.tensor_shards = tensor_shards
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.device = device or local_tensor(self.params[0]).device
        self.adaptive, self.beta2, self.eps = moment2_method, beta2, eps
        if moment2_method == "namo":
            self.step_class = WholeMatrixStep
        if moment2_method is not None:
            for group in self.param_groups:
                group.setdefault("beta2", beta2)
                group.setdefault("eps", eps)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = False) -> None:
        """Create the momentum of a group in one allocation, in the order of its parameters.

        Args:
            group: Parameter group.
            skip_non_grad_params: Ignored: checkpoints need state of all parameters.
        """
        new = [param for param in group["params"] if not self.state[param]]
        if not new or self.step_class is WholeMatrixStep:
            return
        shards = [local_tensor(param) for param in new]
        flat = torch.zeros(
            sum(map(torch.numel, shards)), dtype=self.momentum_dtype, device=shards[0].device
        )
        parts = flat.split([shard.numel() for shard in shards])
        for param, shard, part in zip(new, shards, parts, strict=True):
            momentum = torch.empty_like(param.data, dtype=self.momentum_dtype)
            # Not from_local, whose DTensor would begin where its rows do in the allocation, and
            # could not be copied.
            momentum._local_tensor = part.view_as(shard)  # type: ignore[attr-defined]
            self.state[param]["momentum_buffer"] = momentum

    def planned(self, param: Any) -> PlannedParameter:
        """Return a parameter as the matrix that upstream's ``orthogonalize`` sees.

        It is whole over tensor parallelism also in the modes that ask for it.
        """
        shard = super().planned(param)
        if self.split_qkv and self.is_qkv_fn is not None and self.is_qkv_fn(param):
            shapes = getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes
            shard = replace(shard, blocks=tuple(shapes))
        if self.is_joined(param):
            shard = replace(shard, state_prefix="")
            return over_tensor_ranks(shard, param.device_mesh, param.partition_dim)
        return shard

    def is_joined(self, param: Any) -> bool:
        """Return whether the shards of all tensor-parallel ranks are one matrix."""
        # A head is whole on one tensor-parallel rank, and is orthogonalized there.
        is_by_head = getattr(param, "is_split_by_head", False)
        return self.is_tensor_sharded(param) and self.tp_mode != "blockwise" and not is_by_head

    def problems(self) -> list[str]:
        """List settings that cannot work, too."""
        problems = super().problems()
        try:
            coefficients_of(self.arguments["num_ns_steps"], self.arguments["coefficient_type"])
        except ValueError as error:
            problems.append(in_flags(str(error)))
        return problems

    def settings(
        self, exchange: ExchangeSettings, num_optimizers: int, *, gradients_stay: bool
    ) -> MuonSettings:
        """Return the settings of a step.

        Raises:
            ValueError: Unknown method, or settings that namo cannot have.
        """
        arguments = {**self.arguments, **vars(self)}
        if problems := method_problems(self.adaptive, arguments, exchange):
            raise ValueError("; ".join(problems))
        settings = muon_settings(
            arguments,
            self.scale,
            self._factors,
            exchange,
            overwrites_gradients=True,
            gradients_stay=gradients_stay,
        )
        description = f"{settings.description}, {num_optimizers} optimizers"
        return replace(settings, description=description)

    def _factors(self, parameter: PlannedParameter) -> tuple[float, float]:
        """Return the factors of updates of AdaMuon, by the shape on this tensor-parallel rank."""
        return self.scale(*self.tensor_shards[parameter.param].view.shape)


def build_muon_step(
    optimizers: Sequence[FSDPZeROTensorParallelMuon | FSDPWholeMatrixOptimizer],
    exchange: ExchangeSettings | None = None,
    *,
    gradients_stay: bool = False,
) -> MuonStep:
    """Build the step of the Muon optimizers of a model; called by all ranks together.

    Args:
        optimizers: One for experts and one for dense matrices, or one for both; equal settings.
        exchange: Settings of the exchange; None for the defaults.
        gradients_stay: Whether gradients are in the same memory in every step.

    Raises:
        RuntimeError: On all ranks; see ``MuonStep``. One has a parameter without a layout, or of
            another local shape.
    """
    first = optimizers[0]
    problems = [problem for muon in optimizers for problem in muon.problems()]
    # Groups of the model with all ranks that hold a dense matrix, or an expert.
    groups = [
        getattr(muon.pg_collection, name, None)
        for muon in optimizers
        for name in ("dp_cp", "expt_dp")
    ]
    with naming_flags():
        return first.step_class(
            optimizers,
            [muon.planned(p) for muon in optimizers for p in muon.params] if not problems else [],
            first.settings(
                exchange or ExchangeSettings(), len(optimizers), gradients_stay=gradients_stay
            ),
            first.device,
            problems=problems,
            known_groups=[group for group in groups if group is not None],
        )
