# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One step of Muon: momentum on row shards, Newton-Schulz on whole matrices."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.plan_inputs import find_plan_inputs
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.runtime.owner_compute import OwnerCompute, PlanInput
from megatron_muon.user_errors import naming_flags


class MuonStep:
    """Step the Muon optimizers of a model together.

    Under expert parallelism experts have an optimizer of their own, as in Megatron. All matrices
    share one schedule, so that some are in transit while others are orthogonalized.

    Args:
        optimizers: Those of experts, of dense matrices, or one for both.
        exchange: Settings of the exchange; None for the defaults.

    Raises:
        ValueError: bf16 on the wire was asked for with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when one has a parameter without a layout, not a float32
            DTensor, or of another local shape than its layout's; or when ranks hold different
            parameters or layouts, or came to different plans.

    Communication: at construction a flag, a hash and 8 bytes a rank over all ranks, and that of
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`. :meth:`step`: that of
        ``orthogonalize`` of :attr:`compute`, and of ``finish`` of the optimizers.
    Memory: momentum, see the optimizers; while a step runs, what
        :class:`~megatron_muon.runtime.engine.Engine` stages.
    """

    compute: OwnerCompute
    _found: list[dict[Any, torch.Tensor]]  # of each optimizer, what these two are merged from
    _momentum: dict[Any, torch.Tensor]
    _results: dict[Any, torch.Tensor]

    def __init__(
        self,
        optimizers: Sequence[FSDPZeROTensorParallelMuon],
        exchange: ExchangeSettings | None = None,
    ) -> None:
        # Experts first, which decides the order of the collectives of finish().
        self.optimizers = sorted(
            optimizers, key=lambda muon: not muon.params_of_kind(is_expert=True)
        )
        self._found, self._momentum, self._results = [], {}, {}
        exchange = exchange or ExchangeSettings()
        raise_where_any_rank_fails(
            [problem for muon in self.optimizers for problem in muon.problems()],
            None,
            self._device,
            "No optimizer was built.",
        )
        self._raise_where_ranks_differ(exchange)
        self.compute = self._owner_compute(exchange)
        # For every parameter on every rank, empty shards included: ranks that hold different sets
        # of optimizer state hang Megatron-FSDP's save.
        for muon in self.optimizers:
            for group in muon.param_groups:
                muon._init_group(group, skip_non_grad_params=False)

    @property
    def _device(self) -> torch.device:
        return self.optimizers[0].device

    def _raise_where_ranks_differ(self, exchange: ExchangeSettings) -> None:
        """Compare what decides which collectives follow."""
        entries = [f"{[type(muon).__name__ for muon in self.optimizers]}, {exchange}"]
        entries += [
            f"{muon.newton_schulz.steps} steps of {muon.newton_schulz.coefficient_type} "
            f"coefficients, precision {muon.fp32_matmul_prec}"
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
                [_by_parameter(each.plan_input) for each in found.inputs],
                self.optimizers[0].newton_schulz,
                exchange,
                device=self._device,
                max_num_plans=found.max_num_plans,
            )

    def _precision(self) -> Any:
        return fp32_matmul_precision(self.optimizers[0].fp32_matmul_prec)

    def problems(self) -> list[str]:
        """List what keeps this rank from a step: other parameters than before, or its memory."""
        changes = [change for muon in self.optimizers for change in muon.parameter_changes()]
        return changes + self.compute.memory_problems()

    @torch.no_grad()
    def step(self) -> None:
        """Update parameters and momentum by their gradients; called by all ranks together.

        Gradients must be complete, and are not checked. They are overwritten.
        """
        found = [rows for muon in self.optimizers for rows in muon.advance()]
        # Merged anew only when an optimizer has others: they may have thousands of parameters.
        if not self._found or any(a is not b for a, b in zip(found, self._found, strict=True)):
            self._found = found
            self._momentum = {key: rows for each in found[::2] for key, rows in each.items()}
            self._results = {key: rows for each in found[1::2] for key, rows in each.items()}
        with self._precision():
            for params in self.compute.orthogonalize(self._momentum, self._results):
                for muon in self.optimizers:
                    muon.apply(params)
            for muon in self.optimizers:
                muon.finish()
        for muon in self.optimizers:
            muon.end()
        if not all(muon.gradients_stay for muon in self.optimizers):
            self._found, self._momentum, self._results = [], {}, {}
            self.compute.forget()


def _by_parameter(found: PlanInput) -> PlanInput:
    # A parameter is one matrix here.
    return found._replace(handles={i: rows.param for i, rows in found.handles.items()})
