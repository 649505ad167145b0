# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of whole matrices: the owner of a matrix steps it by the user's class.

A step sends weights and gradients to owners, and new weights back. State is where its matrix is
owned, in the state of the parameter::

    weights, gradients --gather--> owner: optimizer.step() --scatter--> weights
"""

import logging
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.matrices import RowIndex
from megatron_muon.runtime.agreement import first_line, raise_where_any_rank_fails
from megatron_muon.runtime.arena import NOTHING, OtherBytes
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import TensorList, scale_function
from megatron_muon.step.hooks import StepHooks
from megatron_muon.step.matrix_step import StepSettings
from megatron_muon.step.muon_step import MuonSettings, MuonStep
from megatron_muon.step.owned_matrix import Build, OwnedMatrix
from megatron_muon.step.owner_state import StateOwner, States

logger = logging.getLogger(__name__)


class WholeMatrices(StateOwner):
    """The matrices that this rank owns, and their exchange; in place of a ``MatrixStep``.

    Each matrix has an optimizer of its own: a class may have state in its attributes, such as a
    number of steps.

    Args:
        build: Builds an optimizer of parameter groups.
        ignored: Keys of groups that are not the optimizer's.

    Attributes:
        owned: The matrices, in the order of the exchange.
        params: By position, the parameters with local rows, once there is an engine.
        hooks: None are called.
        problems: Errors of the last exchange, as sentences.
    """

    num_inputs = 2
    engine: Engine
    params: Sequence[Any]
    _workspace_bytes: int = 0
    _act: Callable[[OwnedMatrix], None]

    def __init__(self, build: Build, ignored: Collection[str]) -> None:
        self._build, self._ignored = build, {*ignored, "params", "param_names"}
        self.owned: list[OwnedMatrix] = []
        self.hooks: list[StepHooks] = []
        self.problems: list[str] = []

    def claim(
        self, matrices: Sequence[tuple[torch.Tensor, str]], *stacks: torch.Tensor
    ) -> Callable[[Callable[[], None]], None]:
        """Register a matrix; see ``MatrixOwner``."""
        # Plans of whole matrices make no stacks.
        ((param, name),), (weights, gradients) = matrices, stacks
        owned = OwnedMatrix(param, name, weights[0], gradients[0])
        self.owned.append(owned)

        def act(_: object) -> None:
            """Build the optimizer of the matrix in the first exchange, and step it afterwards."""
            try:
                devices = [weights.device] if weights.device.type == "cuda" else []
                with torch.random.fork_rng(devices):
                    # The generator of the model would give numbers that depend on the owner, and
                    # would differ between ranks afterwards.
                    seed = zlib.crc32(f"{name} {self.number % 2**32}".encode())
                    torch.default_generator.manual_seed(seed)
                    if devices:
                        torch.cuda.manual_seed(seed)
                    self._act(owned)
            # Any error: other ranks wait for the results. All ranks raise it after the exchange.
            except Exception as error:
                logger.exception("%s:", name)
                self.problems.append(f"{name}: {first_line(error)}")

        return act

    def use_loaded(self, states: States) -> None:
        """Prepare states that were loaded."""
        super().use_loaded(states)
        for owned in self.owned:
            owned.take_loaded(states[owned.param])

    def attach(self, engine: Engine, params: Sequence[torch.Tensor]) -> None:
        """Set the engine, and the parameters of all groups."""
        handles: list[RowIndex] = engine.handles
        held = {handle.param for handle in handles}
        self.engine, self.params = engine, [param for param in params if param in held]
        self.release, self.forget = engine.release, engine.forget

    def reserve(self, others: OtherBytes = NOTHING) -> None:
        """Reserve the memory of a step; see ``Engine.reserve()``."""
        temporaries = max(others.temporaries, self._workspace_bytes)
        self.engine.reserve(OtherBytes(others.state, temporaries))

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in self._ignored}

    def build(self, groups: Mapping[torch.Tensor, Mapping[str, Any]], weights: TensorList) -> None:
        """Build the optimizers of matrices, in an exchange of weights.

        Args:
            groups: Parameter groups by parameter.
            weights: Float32, by position.
        """
        tried: dict[str, OwnedMatrix] = {}

        def build(owned: OwnedMatrix) -> None:
            """Build an optimizer; of each shape and group one is tried."""
            group = self._options(groups[owned.param])
            owned.build(self._build, group)
            like = tried.setdefault(f"{owned.weight.shape} {group}", owned)
            if like is owned:
                num_bytes = owned.try_step(self._build, group)
                self._workspace_bytes = max(self._workspace_bytes, num_bytes)
            else:
                owned.follow(like)

        self._act = build
        self._exchange(weights, weights, None)

    def step(
        self,
        groups: Mapping[torch.Tensor, Mapping[str, Any]],
        states: Mapping[torch.Tensor, dict[str, Any]],
        weights: TensorList,
        grads: Sequence[torch.Tensor | None],
        overlap_fn: Callable[[], None] | None,
    ) -> None:
        """Replace weights by new ones.

        Args:
            groups: Parameter groups by parameter.
            states: State by parameter.
            weights: Float32, by position.
            grads: Float32 or bfloat16, by position; None for a parameter that stays as it is.
            overlap_fn: Called once, when the first rows are in transit.
        """
        without = {p for p, grad in zip(self.params, grads, strict=True) if grad is None}

        def step(owned: OwnedMatrix) -> None:
            """Step a matrix with a gradient."""
            # A rank without elements of a parameter may have a gradient of it or none, whatever
            # its holders have: they send NaN for a missing one.
            is_known = local_tensor(owned.param).numel() > 0
            if not (owned.param in without if is_known else owned.gradient.isnan().all()):
                group = self._options(groups[owned.param])
                owned.step(self._build, group, states[owned.param])

        self._act = step
        pairs = zip(weights, grads, strict=True)
        filled = [
            torch.full_like(weight, torch.nan) if grad is None else grad.float()
            for weight, grad in pairs
        ]
        self._exchange(weights, filled, overlap_fn)

    def _exchange(
        self, weights: TensorList, grads: TensorList, overlap_fn: Callable[[], None] | None
    ) -> None:
        self.problems.clear()
        weight_rows, grad_rows = (
            {rows: rows.of(by_param[rows.param]) for rows in self.engine.handles}
            for by_param in (dict(zip(self.params, each, strict=True)) for each in (weights, grads))
        )
        for _ in self.engine.orthogonalize((weight_rows, grad_rows), weight_rows, overlap_fn):
            pass
        # Gradients are in other memory in the next step.
        self.forget()


def whole_matrix_settings(
    build: Build,
    ignored: Collection[str],
    exchange: ExchangeSettings,
    description: str,
    *,
    offload_state: bool = False,
) -> MuonSettings:
    """Return the settings of a ``WholeMatrixStep``.

    Args:
        build: See ``WholeMatrices``, as for the next one.
        ignored: Keys of groups.
        exchange: How matrices are exchanged.
        description: The class and its arguments, for the comparison of ranks.
        offload_state: Whether the optimizer keeps state in CPU memory between steps.
    """
    # Nothing is orthogonalized: no coefficients, nor scale, are used.
    newton_schulz = NewtonSchulzSettings(
        5,
        "quintic",
        is_bf16=False,
        scale=scale_function("none", 1.0),
        owner=WholeMatrices(build, ignored),
    )
    step = StepSettings(
        nesterov=False,
        weight_decay_method="decoupled",
        fp32_matmul_prec="highest",
        offload_state=offload_state,
    )
    return MuonSettings(newton_schulz, exchange, step, description)


class WholeMatrixStep(MuonStep):
    """Step matrices by optimizers of whole ones, which their owners run.

    Raises:
        RuntimeError: As ``MuonStep``; also if the class cannot be built for a matrix.

    Communication: as ``MuonStep``; rows are float32, twice as many on their way to owners. At
        construction also one exchange, so that constructors may read weights, or change them. A
        step ends with a flag.
    Memory: staging memory in a step, and the class's own, for one matrix at a time.
    """

    _owner: WholeMatrices

    @torch.no_grad()
    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - of MuonStep
        super().__init__(*args, **options)
        self._owner.build(self._group_of(), self._weights())
        # All ranks of the job construct.
        self._end(None, "No optimizer was built.")
        self._create_state()

    def _make_matrix_step(self, rows_device: torch.device) -> WholeMatrices:
        self._owner.attach(self.engine, self._params)
        return self._owner

    def _init_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Create no momentum."""

    def complete_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Add missing tensors to a state that was created or loaded, as the class makes them."""
        own = {param: state.setdefault(param, {}) for param in self._params}
        self._main_params.create(own)
        self._owner.complete(own)

    def record_metrics(self, is_on: bool = True) -> None:
        """Refuse to record metrics, which describe the updates of Muon."""
        if is_on:
            raise ValueError("record_metrics: expected Muon, got an optimizer of whole matrices")

    def follow_state(self) -> list[str]:
        """Create state that was removed; owners reset it alone, as nobody else has it."""
        problems = super().follow_state()
        self.removed.clear()
        return problems

    @torch.no_grad()
    def step(
        self,
        without: Collection[torch.Tensor] = (),
        overlap_fn: Callable[[], None] | None = None,
    ) -> None:
        """Update parameters by their gradients; see ``MuonStep.step()``.

        Raises:
            RuntimeError: On all ranks, if the class has raised on one.
        """
        groups, states = self._group_of(), self._states()
        self._owner.advance(states, without)
        rows = self._weights(), self._grads(without)
        self._owner.step(groups, states, *rows, overlap_fn)
        advice = "Other matrices were stepped. Load weights and optimizer from a checkpoint."
        self._end(self.group, advice)

    def _group_of(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {param: group for group in self._groups() for param in group["params"]}

    def _end(self, group: dist.ProcessGroup | None, advice: str) -> None:
        """Round weights into parameters, and raise errors of owners on all ranks."""
        if self._main_params.params:
            self._main_params.install(self._states())
        raise_where_any_rank_fails(self._owner.problems, group, self.device, advice)
