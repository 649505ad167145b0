# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One step of Muon: momentum on row shards, Newton-Schulz on whole matrices."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.plan_inputs import find_plan_inputs
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.runtime.arena import NOTHING, OtherBytes
from megatron_muon.runtime.matrix_step import MatrixStep, StepSettings
from megatron_muon.runtime.owner_compute import OwnerCompute
from megatron_muon.user_errors import naming_flags


class MuonStep:
    """Step the Muon optimizers of a model together.

    Under expert parallelism experts have an optimizer of their own, as in Megatron. All matrices
    share one schedule, so that some are in transit while others are orthogonalized.

    Args:
        optimizers: Those of experts, of dense matrices, or one for both.
        exchange: Settings of the exchange; None for the defaults.
        gradients_stay: Whether gradients are in the same memory in every step.

    Raises:
        ValueError: bf16 on the wire was asked for with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when one has a parameter without a layout, not a float32
            DTensor, or of another local shape than its layout's; or when ranks hold different
            parameters or layouts, or came to different plans.

    Communication: at construction a flag and a hash over all ranks, and that of
        :func:`~megatron_muon.rows.plan_inputs.find_plan_inputs` and
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`. :meth:`step`: that of
        ``orthogonalize`` of :attr:`compute`.
    Memory: momentum, see the optimizers; while a step runs, what
        :class:`~megatron_muon.runtime.engine.Engine` stages.
    """

    compute: OwnerCompute
    _matrix_step: MatrixStep
    # By position of the step: parameters with rows on this rank, and their optimizer.
    _held: list[tuple[FSDPZeROTensorParallelMuon, Any]]

    def __init__(
        self,
        optimizers: Sequence[FSDPZeROTensorParallelMuon],
        exchange: ExchangeSettings | None = None,
        *,
        gradients_stay: bool = False,
    ) -> None:
        self.optimizers = list(optimizers)
        exchange = exchange or ExchangeSettings()
        raise_where_any_rank_fails(
            [problem for muon in self.optimizers for problem in muon.problems()],
            None,
            self._device,
            "No optimizer was built.",
        )
        self._raise_where_ranks_differ(exchange)
        self.compute = self._owner_compute(exchange)
        for muon in self.optimizers:
            muon.bind(self.compute)
        # For every parameter on every rank, empty shards included: ranks that hold different sets
        # of optimizer state hang Megatron-FSDP's save.
        for muon in self.optimizers:
            for group in muon.param_groups:
                muon._init_group(group, skip_non_grad_params=False)
        # It may find too little memory.
        self._matrix_step = self.compute.on_all_ranks(partial(self._build_step, gradients_stay))

    def _build_step(self, gradients_stay: bool) -> MatrixStep:
        """List the parameters with rows on this rank, and lay out the memory of a step."""
        first = self.optimizers[0]
        groups = [(muon, group) for muon in self.optimizers for group in muon.param_groups]
        muon_of = {param: muon for muon, group in groups for param in group["params"]}
        step = MatrixStep(
            {param: i for i, (_, group) in enumerate(groups) for param in group["params"]},
            self.compute,
            StepSettings(
                first.nesterov,
                first.weight_decay_method,
                first.fp32_matmul_prec,
                overwrites_gradients=True,
                gradients_stay=gradients_stay,
                stages_momentum=first.momentum_dtype != torch.float32,
            ),
            self._device,
        )
        self._held = [(muon_of[param], param) for param in step.params]
        step.hooks = first.hooks(self._held)
        return step

    @property
    def _device(self) -> torch.device:
        return self.optimizers[0].device

    def _raise_where_ranks_differ(self, exchange: ExchangeSettings) -> None:
        """Compare what decides which collectives follow."""
        methods = [type(muon.method).__name__ for muon in self.optimizers]
        entries = [f"{[type(muon).__name__ for muon in self.optimizers]}, {methods}, {exchange}"]
        entries += [
            f"{muon.newton_schulz.steps} steps of {muon.newton_schulz.coefficient_type} "
            f"coefficients, precision {muon.fp32_matmul_prec}, momentum in {muon.momentum_dtype}"
            for muon in self.optimizers
        ]
        raise_where_ranks_differ(
            entries,
            dist.group.WORLD,  # type: ignore[arg-type]
            self._device,
            "kinds of Muon parameters, and settings",
        )

    def _owner_compute(self, exchange: ExchangeSettings) -> OwnerCompute:
        """Plan the matrices of all optimizers; a pipeline stage may have none."""
        params = [
            (muon, param)
            for is_expert in (True, False)
            for muon in self.optimizers
            for param in muon.params_of_kind(is_expert=is_expert)
        ]
        found = find_plan_inputs(
            [muon.planned(param) for muon, param in params],
            None,
            self._device,
            known_groups=[group for muon in self.optimizers for group in muon.holder_groups()],
        )
        # Kernels are checked here, in the precision of a step.
        with naming_flags(), self._precision():
            return OwnerCompute(
                [each.plan_input for each in found.inputs],
                self.optimizers[0].newton_schulz,
                exchange,
                device=self._device,
                max_num_plans=found.max_num_plans,
            )

    def _precision(self) -> Any:
        return fp32_matmul_precision(self.optimizers[0].fp32_matmul_prec)

    def problems(self, others: OtherBytes = NOTHING) -> list[str]:
        """List what keeps this rank from a step: other parameters than before, or its memory.

        Args:
            others: Memory that the step of other optimizers takes.
        """
        changes = [change for muon in self.optimizers for change in muon.parameter_changes()]
        return changes + self._matrix_step.problems(others)

    def publish_moments(self) -> None:
        """Complete the state, which is to be saved."""
        for muon in self.optimizers:
            for moments, numbers, state in muon.shared_state():
                state.copy_(moments.values[numbers])

    def collect_moments(self) -> None:
        """Learn the second moments of a state that was loaded; called by all ranks together.

        Communication: with normuon one all-reduce a plan, of 4 bytes a row or column of a block.
        """
        found = {moments: torch.zeros_like(moments.values) for moments in self.compute.moments}
        for muon in self.optimizers:
            for moments, numbers, state in muon.shared_state():
                found[moments][numbers] = state
        for moments, values in found.items():
            # Ranks that hold the same rows have the same moments, which are not negative.
            moments.combine(values, dist.ReduceOp.MAX)

    def free(self) -> None:
        """Return the memory of :meth:`problems`, if ranks do not step."""
        self._matrix_step.free()

    @torch.no_grad()
    def step(self) -> None:
        """Update parameters and momentum by their gradients; called by all ranks together.

        Gradients must be complete, and are not checked. They are overwritten.
        """
        self._matrix_step.step(
            # Read in every step: loading replaces them, and schedulers change learning rates.
            [group for muon in self.optimizers for group in muon.param_groups],
            [param._local_tensor for _, param in self._held],
            [param.grad._local_tensor for _, param in self._held],
            [muon.state[param]["momentum_buffer"]._local_tensor for muon, param in self._held],
        )
