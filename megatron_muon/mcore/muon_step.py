# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One step of Muon: momentum on row shards, Newton-Schulz on whole matrices."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.runtime.all_gather_compute import AllGatherCompute
from megatron_muon.runtime.matrix_step import MatrixStep, StepParameter, StepSettings
from megatron_muon.runtime.owned_parameters import lay_out
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
        ValueError: bf16 on the wire was asked for with Newton-Schulz in fp32, or ``all_gather``
            with an optimizer that scales its results later.
        RuntimeError: On all ranks, when one has a parameter without a layout, not a float32
            DTensor, or of another local shape than its layout's; or when ranks hold different
            parameters or layouts, or came to different plans.

    Communication: at construction a flag, a hash and 8 bytes a rank over all ranks, and that of
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`. :meth:`step`: that of
        ``orthogonalize`` of :attr:`compute`, and of ``finish`` of the optimizers.
    Memory: momentum, see the optimizers; while a step runs, what
        :class:`~megatron_muon.runtime.engine.Engine` stages.
    """

    compute: OwnerCompute | AllGatherCompute
    _matrix_step: MatrixStep
    # By position: the parameters of which this rank holds rows, and their optimizer.
    _held: list[tuple[FSDPZeROTensorParallelMuon, Any]]

    def __init__(
        self,
        optimizers: Sequence[FSDPZeROTensorParallelMuon],
        exchange: ExchangeSettings | None = None,
        *,
        gradients_stay: bool = False,
    ) -> None:
        # Experts first, which decides the order of the collectives of finish().
        self.optimizers = sorted(
            optimizers, key=lambda muon: not muon.params_of_kind(is_expert=True)
        )
        exchange = exchange or ExchangeSettings()
        raise_where_any_rank_fails(
            [problem for muon in self.optimizers for problem in muon.problems()],
            None,
            self._device,
            "No optimizer was built.",
        )
        self._raise_where_ranks_differ(exchange)
        if exchange.mode == "owner":
            self.compute = self._owner_compute(exchange)
        else:
            self.compute = self._all_gather_compute()
        # For every parameter on every rank, empty shards included: ranks that hold different sets
        # of optimizer state hang Megatron-FSDP's save.
        for muon in self.optimizers:
            for group in muon.param_groups:
                muon._init_group(group, skip_non_grad_params=False)
        self._matrix_step = self._build_step(gradients_stay)

    def _build_step(self, gradients_stay: bool) -> MatrixStep:
        """List the parameters with rows on this rank, and lay out the memory of a step."""
        first = self.optimizers[0]
        own = [
            (muon, p) for muon in self.optimizers for p in muon.params if p._local_tensor.numel()
        ]
        self._held = own
        numbers = itertools.accumulate((len(m.param_groups) for m in self.optimizers), initial=0)
        first_group = dict(zip(map(id, self.optimizers), numbers, strict=False))
        return MatrixStep(
            [
                StepParameter(
                    first_group[id(muon)] + muon.number_of_group(param),
                    param._local_tensor.shape,
                    {param: _itself},
                )
                for muon, param in own
            ],
            self.compute,
            StepSettings(
                first.nesterov,
                first.weight_decay_method,
                first.fp32_matmul_prec,
                overwrites_gradients=True,
                gradients_stay=gradients_stay,
                stages_momentum=first.momentum_dtype != torch.float32 or first.offload_momentum,
            ),
            self._device,
            first.hooks(own),
        )

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
        """Plan experts first: most are whole on one rank, and dense matrices balance the load.

        Without expert parallelism both kinds are in one optimizer, over groups of their own. A
        pipeline stage may lack a kind, and joins the collectives over all ranks.
        """
        kinds = [
            [muon.owned(p) for muon in self.optimizers for p in muon.params_of_kind(is_expert=kind)]
            for kind in (True, False)
        ]
        found = torch.tensor([bool(kind) for kind in kinds], device=self._device).int()
        on_ranks = found.new_empty(dist.get_world_size(), len(kinds))
        dist.all_gather_into_tensor(on_ranks.view(-1), found)
        inputs = [
            lay_out(parameters, self._device)
            for parameters, is_there in zip(kinds, on_ranks.amax(dim=0).tolist(), strict=True)
            if is_there
        ]
        # Kernels are checked here, in the precision of a step.
        with naming_flags(), self._precision():
            return OwnerCompute(
                [each for each in inputs if each.matrices],
                self.optimizers[0].newton_schulz,
                exchange,
                device=self._device,
                max_num_plans=int(on_ranks.sum(dim=1).max()),
            )

    def _all_gather_compute(self) -> AllGatherCompute:
        for muon in self.optimizers:
            if not muon.scales_results:
                raise ValueError(
                    f"{type(muon).__name__}: expected --muon-fsdp-exchange owner, got all_gather, "
                    "which scales results before they can be normalized. Leave it out, or use "
                    "--adaptive-muon-moment2-method adamuon."
                )
        muon_of = {param: muon for muon in self.optimizers for param in muon.params}
        return AllGatherCompute(
            {param: muon.matrices[param] for param, muon in muon_of.items()},
            lambda param, momentum: muon_of[param].orthogonalize_whole(param, momentum),
            self._device,
        )

    def _precision(self) -> Any:
        return fp32_matmul_precision(self.optimizers[0].fp32_matmul_prec)

    def problems(self, other_bytes: int = 0) -> list[str]:
        """List what keeps this rank from a step: other parameters than before, or its memory.

        Args:
            other_bytes: Memory that the step of other optimizers takes.
        """
        changes = [change for muon in self.optimizers for change in muon.parameter_changes()]
        return changes + self._matrix_step.problems(other_bytes)

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


def _itself(rows: torch.Tensor) -> torch.Tensor:
    return rows
