# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Construct the exchange, the state and the step of Muon optimizers."""

import logging
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.agreement import (
    first_line,
    own_rank,
    raise_where_any_rank_fails,
    raise_where_ranks_differ,
)
from megatron_muon.runtime.arena import NOTHING, OtherBytes, is_out_of_memory
from megatron_muon.runtime.engine_builder import build_engine, on_all_ranks
from megatron_muon.runtime.tensors import are_same, local_tensor, sharding_of
from megatron_muon.step.dependencies import releases
from megatron_muon.step.hooks import MOMENT2_BUFFER, AdaMuon, AdaMuonSettings, CautiousDecay
from megatron_muon.step.matrix_step import MatrixStep, StepSettings
from megatron_muon.step.metrics import MetricSums, StepMetrics
from megatron_muon.step.owner_state import MOMENT2_OF_OWNER, StateOwner
from megatron_muon.step.plan_inputs import find_plan_inputs
from megatron_muon.step.stored_state import MAIN_PARAM, MainParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MuonSettings:
    """Settings of Muon, equal on all ranks.

    Args:
        newton_schulz: Steps, coefficients, precision and scale.
        exchange: How matrices are exchanged.
        step: Settings of a step.
        description: Scale mode, factor and method as text, for the comparison of ranks.
        adamuon: Settings of AdaMuon; None for another method, or none.
    """

    newton_schulz: NewtonSchulzSettings
    exchange: ExchangeSettings
    step: StepSettings
    description: str
    adamuon: AdaMuonSettings | None = None

    def entries(self) -> list[str]:
        """Return all settings as text, and the releases that they are computed by."""
        orthogonalize = self.newton_schulz
        return [
            releases(),
            str(self.exchange),
            f"{orthogonalize.steps} steps of {orthogonalize.coefficient_type} coefficients, "
            f"function {orthogonalize.function is not None}",
            str(self.step),
            f"scale {self.description}",
        ]


class MuonStep:
    """Step the Muon optimizers of a model together, through one exchange.

    ``param_groups`` and ``state`` of an optimizer are read in every step, and ``_init_group``
    creates its momentum. Megatron has an optimizer for experts, and one for dense matrices. All
    matrices share one schedule, so that some are in transit while others are orthogonalized.

    Args:
        optimizers: The optimizers.
        parameters: All parameters of their groups, as they are planned.
        settings: Settings of all optimizers.
        device: Where matrices are orthogonalized.
        rows_device: Where shards are; None for ``device``.
        problems: Errors that this rank has found before, as sentences.
        known_groups: Process groups of the model that may be used.
        has_others: Whether this rank steps other parameters meanwhile.

    Attributes:
        engine: Orthogonalizes matrices.
        group: Ranks that step together, as agreed; None if that is the whole job.
        plan_inputs: Plans of this rank, and their parameters.
        removed: Parameters whose state was removed since the last step, and is fresh.

    Raises:
        RuntimeError: On all ranks, when one has a problem, ranks have different settings,
            parameters or plans, or one lacks memory.

    Communication: at construction a flag and a hash over all ranks, the collectives of
        ``find_plan_inputs()`` and ``build_engine()``, then one flag. In ``step()`` the collectives
        of ``orthogonalize`` of ``engine``.
    Memory: the state of the optimizers; while a step runs, see ``MatrixStep``.
    """

    _metrics: MetricSums | None = None
    _owner: StateOwner | None

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[PlannedParameter],
        settings: MuonSettings,
        device: torch.device,
        rows_device: torch.device | None = None,
        *,
        problems: Sequence[str] = (),
        known_groups: Sequence[dist.ProcessGroup] = (),
        has_others: bool = False,
    ) -> None:
        self.optimizers, self.device = list(optimizers), device
        self._step, self._adamuon = settings.step, settings.adamuon
        # All owners keep state.
        self._owner = settings.newton_schulz.owner  # type: ignore[assignment]
        raise_where_any_rank_fails(problems, None, device, "No optimizer was built.")
        if dist.is_initialized():
            # The collectives that follow depend on these settings.
            raise_where_ranks_differ(settings.entries(), None, device, "Muon settings")
        self.plan_inputs = find_plan_inputs(
            parameters, device, has_others=has_others, known_groups=known_groups
        )
        self.group = self.plan_inputs.group
        # Kernels are checked here, in the precision of a step.
        with fp32_matmul_precision(settings.step.fp32_matmul_prec):
            self.engine = build_engine(
                self.plan_inputs.inputs,
                settings.newton_schulz,
                settings.exchange,
                device=device,
                rows_device=rows_device,
                max_num_plans=self.plan_inputs.max_num_plans,
            )
        if settings.exchange.log_plan:
            _log_plans(self.engine.plans)
        self._planned = {parameter.param: parameter for parameter in parameters}
        if self._owner is not None:
            self._owner.begin(self._planned)
        self._params = self._all_params()
        self._shards = [local_tensor(param) for param in self._params]
        # A rank may find too little memory.
        on_all_ranks(lambda: self._build(rows_device or device), settings.exchange, device)

    def _build(self, rows_device: torch.device) -> None:
        """Lay out the memory of a step, and create state."""
        self._matrix_step = self._make_matrix_step(rows_device)
        self._main_params = MainParams(self._params)
        self._optimizer_of: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self._optimizer_of |= dict.fromkeys(group["params"], optimizer)
                self._init_group(optimizer, group)
        self.record_metrics(is_on=False)
        self.removed: set[torch.Tensor] = set()
        self._create_state()

    def _create_state(self) -> None:
        """Create state.

        For every parameter on every rank, empty shards included: ranks that hold different sets of
        state hang Megatron-FSDP's save, and checkpoints need no step to make state.
        """
        self.complete_state(self._states())
        # Sharding of the state by parameter, and references to its tensors in the last step.
        self._stored = {
            param: self._shards_of({k: v for k, v in own.items() if isinstance(v, torch.Tensor)})
            for param, own in self._states().items()
        }
        self._followed: list[Any] = []

    def _make_matrix_step(self, rows_device: torch.device) -> Any:  # noqa: ANN401 - of a subclass
        return MatrixStep(
            {param: i for i, group in enumerate(self._groups()) for param in group["params"]},
            self.engine,
            self._step,
            rows_device,
        )

    def _init_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Create momentum of a group."""
        optimizer._init_group(group, skip_non_grad_params=False)  # type: ignore[attr-defined]

    def _state_of(self, position: int) -> dict[str, Any]:
        param = self._matrix_step.params[position]
        return self._optimizer_of[param].state[param]

    def _states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of all optimizers by parameter, which users and loading replace."""
        owners = self._optimizer_of.items()
        return {param: optimizer.state.setdefault(param, {}) for param, optimizer in owners}

    def complete_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Add missing tensors to a state that was created or loaded, in the dtypes of this run."""
        own = {param: state.setdefault(param, {}) for param in self._params}
        for param, values in own.items():
            if (momentum := values.get("momentum_buffer")) is None:
                momentum = torch.zeros_like(param.detach())
            # torch makes and loads it like its parameter.
            values["momentum_buffer"] = momentum.to(self._step.momentum_dtype)
            if self._adamuon is not None and MOMENT2_BUFFER not in values:
                values[MOMENT2_BUFFER] = torch.zeros_like(param, dtype=torch.float32)
        self._main_params.create(own)
        if self._owner is not None:
            self._owner.complete(own)

    def _shards_of(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Describe the shards of a state by name."""
        memory = () if self._step.offload_state else ("device",)
        return {
            # Momentum is converted.
            key: sharding_of(value, *memory, *(() if key == "momentum_buffer" else ("dtype",)))
            for key, value in values.items()
        }

    def follow_state(self) -> list[str]:
        """Create state that was removed since the last step, and list tensors that do not fit.

        Users own the state: they empty it between phases of a training, or replace its tensors.
        """
        states = self._states()
        own = zip(states.values(), self._stored.values(), strict=True)
        places = [(state, key) for state, shards in own for key in shards]
        if are_same(self._followed, [state.get(key) for state, key in places]):
            return []
        problems, removed = [], set()
        for param, shards in self._stored.items():
            actual = self._shards_of(states[param])
            # Owners reset their own state alone: nobody else has it.
            if any(not key.endswith(MOMENT2_OF_OWNER) for key in shards.keys() - actual.keys()):
                removed.add(param)
            problems += [
                f"{self._planned[param].name}: expected {key} of {shards[key]}, got {actual[key]}. "
                "Put a tensor like the parameter there, or remove it"
                for key in shards.keys() & actual.keys()
                if shards[key] != actual[key]
            ]
        if problems:
            return problems
        self.removed |= removed
        if removed:
            # Views of removed tensors would keep their memory.
            self._matrix_step.forget()
        self.complete_state(states)
        self._followed = [weakref.ref(state[key]) for state, key in places]
        return []

    def use_loaded(self) -> None:
        """Prepare a state that was loaded."""
        if self._owner is not None:
            self._owner.use_loaded(self._states())

    def refresh_main_params(self) -> None:
        """Let the next step read bfloat16 parameters that were changed outside of a step."""
        self._main_params.are_stale = True

    def record_metrics(self, is_on: bool = True) -> None:
        """Record metrics of every step for ``last_metrics()``, by a pass over its tensors."""
        step, adamuon = self._matrix_step, self._adamuon
        # All hooks of a step are listed here, in the order that ``hooks`` states.
        step.hooks, self._metrics = [], None
        if adamuon is not None:
            parameters = [self._planned[param] for param in step.params]
            step.hooks.append(AdaMuon(self._state_of, parameters, adamuon))
        if is_on:
            self._metrics = MetricSums([self._planned[p] for p in step.params], step.group_index)
            step.hooks.append(self._metrics)
        # Last: metrics of updates are without decay.
        if self._step.weight_decay_method == "cautious":
            step.hooks.append(CautiousDecay())

    def last_metrics(self) -> StepMetrics:
        """Return the metrics of the last step; called by all ranks that step together.

        Raises:
            RuntimeError: ``record_metrics()`` was not called.

        Communication: a gather of objects. The host waits for the device.
        """
        if self._metrics is None:
            raise RuntimeError(
                "last_metrics: expected record_metrics() before the step, got none. Call it first."
            )
        return self._metrics.metrics(self.group, len(self._groups()))

    def reserve(self, others: OtherBytes = NOTHING) -> list[str]:
        """Reserve the memory of a step, before ranks agree to step.

        Args:
            others: Memory of the step of other optimizers.

        Returns:
            Errors, as sentences: a lack of memory, or other parameters than at construction.
        """
        problems = self._changes()
        try:
            problems += self.follow_state()
            self._matrix_step.reserve(others)
            if self._main_params.params and not problems:
                self._main_params.refresh(self._states())
        # Any error: other ranks wait for this one.
        except Exception as error:
            if not is_out_of_memory(error):
                logger.exception("before a step:")
            problems.append(first_line(error))
        return problems

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups; loading replaces them, and schedules change values."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _all_params(self) -> list[Any]:
        return [param for group in self._groups() for param in group["params"]]

    def _changes(self) -> list[str]:
        """List changes of the parameters since construction, as sentences."""
        now = self._all_params()
        if len(now) != len(self._params) or not all(map(operator.is_, now, self._params)):
            return [
                f"param_groups: expected the {len(self._params)} parameters of construction, got "
                f"{len(now)}, or others. Build a new optimizer"
            ]
        # As local_tensor(), without a call for every parameter of the model in every step.
        shards = [getattr(param, "_local_tensor", param) for param in now]
        if all(map(operator.is_, shards, self._shards)):
            return []
        errors = [
            f"{self._planned[param].name}: expected a local shard of shape {tuple(old.shape)}, got "
            f"{tuple(shard.shape)}. Build a new optimizer after the model was sharded again"
            for param, shard, old in zip(now, shards, self._shards, strict=True)
            if shard.shape != old.shape
        ]
        if not errors:
            self._shards = shards
        return errors

    def release(self) -> None:
        """Return the memory of ``reserve()``, if ranks do not step."""
        self._matrix_step.release()

    @torch.no_grad()
    def step(
        self,
        without: Collection[torch.Tensor] = (),
        overlap_fn: Callable[[], None] | None = None,
    ) -> None:
        """Update parameters and momentum by their gradients; called by all ranks together.

        Gradients must be complete, and are not checked.

        Args:
            without: Parameters without a gradient on any rank. They keep value and state.
            overlap_fn: Called once, when the first rows are in transit.
        """
        self.removed.clear()
        # Read in every step: loading replaces them.
        states = [self._optimizer_of[param].state[param] for param in self._matrix_step.params]
        if self._owner is not None:
            self._owner.advance(self._states(), without)
        self._matrix_step.step(
            self._groups(),
            self._weights(),
            self._grads(without),
            [local_tensor(state["momentum_buffer"]) for state in states],
            overlap_fn,
        )
        if self._main_params.params:
            self._main_params.install(self._states())

    def _weights(self) -> list[torch.Tensor]:
        """Return local float32 weights by position of the step."""
        weights: list[Any] = self._matrix_step.params
        if self._main_params.params:
            pairs = enumerate(weights)
            weights = [self._state_of(i).get(MAIN_PARAM, param) for i, param in pairs]
        return list(map(local_tensor, weights))

    def _grads(self, without: Collection[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return local gradients by position of the step."""
        return [
            None if param.grad is None or param in without else local_tensor(param.grad)
            for param in self._matrix_step.params
        ]


def _log_plans(plans: Sequence[ExchangePlan]) -> None:
    """Log a line for each plan that has this rank as its first one; all its ranks have it."""
    for plan in plans:
        if plan.ranks[0] == own_rank():
            logger.info(
                "Muon exchange of %d ranks, %d to %d: %d matrices, %d of them local, %d buckets, "
                "%.3f GB of staging",
                len(plan.ranks),
                plan.ranks[0],
                plan.ranks[-1],
                len(plan.matrices),
                len(plan.local),
                len(plan.buckets),
                plan.staging_bytes / 1e9,
            )
