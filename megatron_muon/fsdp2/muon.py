# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for DTensors: momentum on shards, Newton-Schulz on whole matrices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.mixin import WeightDecayT
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from emerging_optimizers.utils import FP32MatmulPrecT, fp32_matmul_precision
from torch.optim.optimizer import ParamsT

from megatron_muon.fsdp2.adaptive import SecondMoments
from megatron_muon.fsdp2.figures import StepFigures, StepSums
from megatron_muon.fsdp2.gradients import (
    Holders,
    by_holders,
    parameters_without_gradient,
    refuse_grad_scaler,
)
from megatron_muon.fsdp2.loading import load_together
from megatron_muon.fsdp2.main_params import KEY as MAIN_PARAM
from megatron_muon.fsdp2.main_params import MainParams
from megatron_muon.fsdp2.offload import place_momentum, wait_for_copies
from megatron_muon.fsdp2.parameters import PlainGroups, devices_of, named_parameters
from megatron_muon.fsdp2.problems import (
    Settings,
    parameter_problem,
    repeated_problems,
    subclass_problems,
)
from megatron_muon.fsdp2.scales import scale_function
from megatron_muon.newton_schulz.methods import StackMethod
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.parameters import NamedParameter
from megatron_muon.rows.plan_inputs import find_plan_inputs
from megatron_muon.runtime.agreement import (
    INTERRUPTED,
    first_line,
    raise_where_any_rank_fails,
    raise_where_ranks_differ,
)
from megatron_muon.runtime.arena import NOTHING, OtherBytes
from megatron_muon.runtime.dependencies import dependency_problems, environment_problems
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import MatrixStep, StepSettings
from megatron_muon.runtime.owner_compute import OwnerCompute


class Muon(WholeMatrixMuon):
    """Step matrices that ``fully_shard`` has sharded; one rank orthogonalizes a matrix.

    A step equals that of emerging-optimizers' ``Muon`` on the unsharded model: to the bit with
    ``exchange.wire`` fp32 and ``exchange.max_parts`` 1, otherwise but for rounding
    (docs/numerics.md). Mesh and placements of a parameter, or Megatron-FSDP, say which rows a rank
    holds; parameters may be on different meshes. Step the rest, such as embeddings, norms and
    biases, with AdamW.

    It is built by all ranks of the job together, once parameters are DTensors: before the first
    forward pass, or after a backward pass. A rank without parameters, as a pipeline stage may be,
    passes ``[]``.

    Args:
        params: Parameters, pairs of name and parameter, or groups of either. A matrix is
            ``(outputs, inputs)``; three dimensions are a batch of them. Groups may have, besides
            ``lr``, ``momentum`` and ``weight_decay``: ``split_sizes``, rows of blocks that are
            orthogonalized separately (a number of equal blocks; the rows of the blocks, of which
            the last may be -1 for all others; or the rows of the blocks of a group that repeats,
            such as query, key and value), ``transposed``, for matrices that are stored and scaled
            as ``(inputs, outputs)``, and ``flatten``, for convolutions: all dimensions but the
            first are columns.
        lr: Learning rate.
        momentum: Weight of the momentum's past.
        weight_decay: Coefficient.
        nesterov: Whether the gradient is averaged into the momentum once more.
        weight_decay_method: ``decoupled``, ``independent``, ``palm`` or ``l2``.
        fp32_matmul_prec: Precision of Newton-Schulz; ``medium`` is bf16.
        coefficient_type: Name of emerging-optimizers' coefficients.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: How results are scaled by shape: ``spectral``, ``shape_scaling``,
            ``unit_rms_norm`` (``spectral_unclamped`` in torch), ``match_adamw`` (``spectral`` times
            0.2, the update size of AdamW), or ``none``.
        extra_scale_factor: Another factor of results.
        use_syrk: Must be False; ``exchange.newton_schulz`` chooses kernels.
        exchange: How matrices are exchanged; None for the defaults.
        group: Ranks that step together; None for all ranks that have parameters.
        process_group: Ranks with copies of this rank's parameters, which are plain tensors, as
            under DDP.
        tensor_group: Ranks with the other blocks of parameters that have a ``partition_dim`` of 0
            or 1, plain tensors of Transformer Engine's or Megatron's tensor parallelism, in the
            order of the blocks, which may be uneven. Other parameters are the same on all of them.
        newton_schulz: Orthogonalizes stacks ``(num_matrices, rows, cols)`` of float32 matrices in
            place of Newton-Schulz. Matrices are then sent in fp32, and not split.
        adaptive: Divides results by second moments: ``normuon``, ``namo`` or ``adamuon``, those of
            emerging-optimizers' ``AdaptiveMuon``; or a :class:`StackMethod`.
        beta2: Decay rate of the second moment.
        eps: Keeps its divisor from zero.
        momentum_dtype: bfloat16 halves the memory of momentum, which is averaged in float32 and
            rounded once a step.
        offload_momentum: Whether momentum is in CPU memory, pinned. A step copies it to the device
            and back, and the host waits for it in the end. No GPU has run it yet.
        others: Groups of parameters that another optimizer steps while this one does, as
            :class:`MuonAdamW` lets it: their gradients are checked too.

    Attributes:
        fresh_if_moved: Whether a state is loaded although it has none for some parameters, or that
            of another algorithm. They get fresh state, and parameter groups that the checkpoint
            does not have keep their values. False when it is built: such a state is refused.

    Raises:
        RuntimeError: On all ranks, naming ranks and parameters, when one cannot be stepped (see
            docs/fsdp2.md), settings cannot work, or ranks have different settings, parameters or
            plans.

    Communication: at construction see :func:`~megatron_muon.rows.plan_inputs.find_plan_inputs` and
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`. Each step: see
        :func:`~megatron_muon.fsdp2.gradients.parameters_without_gradient` and
        :class:`~megatron_muon.runtime.engine.Engine`.
    Memory: one float32 per local element of a parameter, or half with ``momentum_dtype`` bfloat16;
        one more for parameters in bfloat16, whose updates would be rounded away without. While a
        step runs another one, for results, and what the engine stages. With ``CPUOffloadPolicy``
        all but the latter is in CPU memory.
    """

    # torch.amp.GradScaler then calls step() whatever it has found, so that it can be refused. It
    # would leave out the step of a rank whose gradients overflowed, for which the others wait.
    _step_supports_amp_scaling = True

    compute: OwnerCompute
    _holders: dict[Holders, NamedParameter]
    _matrix_step: MatrixStep
    _named: dict[torch.Tensor, NamedParameter]
    _sums: StepSums | None = None
    _is_built: bool = False
    fresh_if_moved: bool = False
    # From the first change of a step to its end: if it does not come there, nobody knows which
    # weights and momentum have changed.
    _is_changing: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        *,
        nesterov: bool = False,
        weight_decay_method: WeightDecayT = "decoupled",
        fp32_matmul_prec: FP32MatmulPrecT = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        use_syrk: bool = False,
        exchange: ExchangeSettings | None = None,
        group: dist.ProcessGroup | None = None,
        process_group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
        newton_schulz: Callable[[torch.Tensor], torch.Tensor] | None = None,
        adaptive: str | StackMethod | None = None,
        beta2: float = 0.95,
        eps: float = 1e-8,
        momentum_dtype: torch.dtype = torch.float32,
        offload_momentum: bool = False,
        others: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.exchange = exchange or ExchangeSettings()
        scale = scale_function(scale_mode, extra_scale_factor)
        self._moments = SecondMoments(adaptive, beta2, eps, scale)
        self._group, self._plain = group, PlainGroups(process_group, tensor_group)
        self.momentum_dtype, self.offload_momentum = momentum_dtype, offload_momentum
        self._others = list(named_parameters(others))
        settings = Settings(
            weight_decay_method,
            fp32_matmul_prec,
            coefficient_type,
            num_ns_steps,
            scale_mode,
            use_syrk,
            self.exchange,
            newton_schulz,
            adaptive,
            momentum_dtype,
        )
        problems = dependency_problems() + environment_problems() + settings.problems()
        try:
            super().__init__(
                # torch refuses an empty list, which a pipeline stage may have.
                list(params) or [{"params": []}],
                lr,
                momentum,
                weight_decay,
                nesterov=nesterov,
                weight_decay_method=weight_decay_method,
                fp32_matmul_prec=fp32_matmul_prec,
                coefficient_type=coefficient_type,
                num_ns_steps=num_ns_steps,
            )
        # Other ranks go on: they learn of it with all other problems.
        except (TypeError, ValueError) as error:
            problems.append(first_line(error))
            self.param_groups: list[dict[str, Any]] = []
        self._device, self._rows_device = devices_of(self.param_groups)
        self._plan(
            NewtonSchulzSettings(
                num_ns_steps,
                coefficient_type,
                settings.is_bf16,
                self._moments.scale_of_results,
                newton_schulz,
                self._moments.method,
            ),
            f"scale {scale_mode} {extra_scale_factor}, {nesterov=}, {weight_decay_method=}, "
            f"{momentum_dtype=}, {offload_momentum=}, function {newton_schulz is not None}, "
            f"adaptive {self._moments.description}",
            problems,
        )
        # For all parameters from the start: checkpoints need no step to make state.
        for param_group in self.param_groups:
            self._init_group(param_group, skip_non_grad_params=False)
        problems = place_momentum(self.state, self.momentum_dtype, in_cpu_memory=offload_momentum)
        if offload_momentum:
            raise_where_any_rank_fails(problems, None, self._device, "No optimizer was built.")
        self._main_params.create(self.state)
        self._moments.create(self.state)
        self._is_built = True

    def _plan(
        self, newton_schulz: NewtonSchulzSettings, other_settings: str, problems: list[str]
    ) -> None:
        """Check parameters on all ranks, and plan their exchange; settings are equal on all."""
        parameters, unseen = self._plain.viewed(
            list(named_parameters(self.param_groups)), self._device
        )
        problems = problems + unseen + subclass_problems(self) + repeated_problems(parameters)
        of_parameters = (parameter_problem(each, self._rows_device) for each in parameters)
        problems += filter(None, of_parameters)
        raise_where_any_rank_fails(problems, None, self._device, "No optimizer was built.")
        if dist.is_initialized():
            # What follows is collective, and which collectives depends on these.
            raise_where_ranks_differ(
                [
                    str(self.exchange),
                    f"{newton_schulz.steps} steps of {newton_schulz.coefficient_type} "
                    f"coefficients, precision {self.fp32_matmul_prec}",
                    other_settings,
                ],
                dist.group.WORLD,  # type: ignore[arg-type]
                self._device,
                "Muon settings",
            )
        found = find_plan_inputs(
            parameters, self._group, self._device, has_others=bool(self._others)
        )
        self._inputs, self._group = found.inputs, found.group
        self._holders = by_holders(found.inputs, self._others, self._plain)
        # Kernels are checked here, in the precision of a step.
        with fp32_matmul_precision(self.fp32_matmul_prec):
            self.compute = OwnerCompute(
                [each.plan_input for each in self._inputs],
                newton_schulz,
                self.exchange,
                device=self._device,
                rows_device=self._rows_device,
                max_num_plans=found.max_num_plans,
            )
        self._named = {each.param: each for each in parameters}
        self._main_params = MainParams(list(self._named))
        # It may find too little memory.
        self._matrix_step = self.compute.on_all_ranks(self._new_step)
        self._moments.attach(self._matrix_step, self._inputs, self._named, lambda: self.state)

    def _new_step(self) -> MatrixStep:
        stages = self.momentum_dtype != torch.float32 or self.offload_momentum
        settings = StepSettings(
            self.nesterov, self.weight_decay_method, self.fp32_matmul_prec, stages_momentum=stages
        )
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        return MatrixStep(group_of, self.compute, settings, self._rows_device)

    def record_figures(self, is_on: bool = True) -> None:
        """Record the figures of each step for :meth:`last_step`, by a pass over its tensors."""
        step = self._matrix_step
        sums = StepSums([self._named[p] for p in step.params], step.groups) if is_on else None
        self._sums, step.hooks = sums, [*self._moments.hooks, *filter(None, [sums])]
        self.compute.watch(None if sums is None else sums.watch)

    def last_step(self) -> StepFigures:
        """Return the figures of the last step; called by all ranks that step together.

        Raises:
            RuntimeError: :meth:`record_figures` was not called.

        Communication: a gather of objects. The host waits for the device.
        """
        if self._sums is None:
            raise RuntimeError(
                "last_step: expected record_figures() before the step, got none. Call it first."
            )
        return self._sums.figures(self._group, len(self.param_groups))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does at construction; later the plan is made."""
        if self._is_built:
            raise RuntimeError(
                "add_param_group: expected all parameters at construction, which plans their "
                "exchange, got more. Build a new optimizer with all of them."
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as object's
        """Refuse to be copied or pickled: process groups cannot be."""
        raise TypeError(
            "Muon: expected no copy, which would need process groups of its own. Build another "
            "one, and load the state of this one."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load momentum and groups; how matrices are split stays that of this run.

        Called by all ranks that step together.

        Raises:
            RuntimeError: On all ranks, when one cannot load its state, a parameter gets no
                momentum, or one that is sharded otherwise. The old state stays.

        Communication: a flag over the ranks that step together.
        """
        load_together(self, self, ["muon"] * len(self.param_groups), state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update parameters and momentum by their gradients; called by all ranks together.

        A parameter that has no gradient on any rank keeps its value and momentum.

        Args:
            closure: Computes the loss and gradients; None if gradients are there.

        Returns:
            The loss of the closure.

        Raises:
            RuntimeError: On all ranks, when a gradient is not finite, or missing on some ranks;
                nothing was updated. Gradients are scaled by a ``GradScaler``. The last step ended
                in the middle by an error on one rank, and no state has been loaded since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_meanwhile(None)
        return loss

    @torch.no_grad()
    def _step_meanwhile(
        self,
        meanwhile: Callable[[], None] | None,
        problems: Sequence[str] = (),
        others: OtherBytes = NOTHING,
    ) -> None:
        """Step, and call a function when the first rows are in transit.

        Args:
            meanwhile: What else is to be done, without communication.
            problems: Sentences for which all ranks refuse the step.
            others: Memory that it takes.
        """
        # A rank without parameters has nothing to step, and nothing to agree on.
        if not self._holders:
            return
        refuse_grad_scaler(self)
        problems = [*problems, *self._main_params.follow(self.state)]
        problems += self._matrix_step.problems(others)
        if self._is_changing:
            problems.append(INTERRUPTED)
        try:
            without = parameters_without_gradient(
                self._holders, self._group, self._device, problems
            )
        except RuntimeError:
            self._matrix_step.free()
            raise
        params = self._matrix_step.params
        self._is_changing = True
        with self._moments.kept(without):
            self._matrix_step.step(
                self.param_groups,
                [local_tensor(self.state[p].get(MAIN_PARAM, p)) for p in params],
                [None if p.grad is None or p in without else local_tensor(p.grad) for p in params],
                [local_tensor(self.state[p]["momentum_buffer"]) for p in params],
                meanwhile,
            )
        self._main_params.install(self.state)
        if self.offload_momentum:
            wait_for_copies(self._device)
        self._is_changing = False
