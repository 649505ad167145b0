# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of whole matrices: the owner of a matrix steps it by the user's class.

A step sends weights and gradients to owners, and new weights back. State is where its matrix is
owned, in the state of the parameter::

    weights, gradients --gather--> owner: optimizer.step() --scatter--> weights
"""

import logging
import random
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from megatron_muon.rows.matrices import RowIndex
from megatron_muon.runtime.agreement import first_line, gather_objects, raise_where_any_rank_fails
from megatron_muon.runtime.arena import NOTHING, OtherBytes
from megatron_muon.runtime.engine import Engine
from megatron_muon.step.elementwise import TensorList
from megatron_muon.step.hooks import StepHooks
from megatron_muon.step.muon_step import MuonStep

logger = logging.getLogger(__name__)

# Keys of the number of the last step, in the state of each parameter on all ranks, and of each
# matrix on its owner. torch's full_state_dict keeps the first for all parameters, and the second
# for one rank alone: a difference shows that state of other owners is missing.
STEP_OF_ALL, STEP_OF_OWNER = "step_of_all_ranks", "step_of_owner"
# Builds an optimizer of parameter groups.
type Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class _OwnedMatrix:
    """A matrix that this rank owns, and the optimizer that steps it.

    Args:
        param: The parameter that it belongs to.
        name: Name of the matrix.
        weight: ``(rows, cols)`` float32, memory of the exchange.
        gradient: The same for the gradient.

    Attributes:
        weight: The parameter that the optimizer steps, in the same memory.
        prefix: Prefix of the names of its state, which is in the state of the parameter.
        optimizer: Its optimizer, once it is built.
        is_fresh: Whether its state only shows loads what to expect, and the next step drops it: its
            class makes state in the first step.
        strides: Strides of the tensors of its state after a step, by name.
    """

    optimizer: torch.optim.Optimizer
    prefix: str = ""
    is_fresh: bool = False
    strides: Mapping[str, tuple[int, ...]]
    _num_steps: int = 0

    def __init__(
        self, param: torch.Tensor, name: str, weight: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        self.param, self.name, self._memory, self._gradient = param, name, weight, gradient
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._paths: dict[str, Any] = {}  # keys of nested state, by name

    def build(self, build: Build, group: Mapping[str, Any]) -> None:
        """Build the optimizer, which may read the weight, and change it."""
        self.optimizer = build([{**group, "params": [self.weight]}])
        self._restore_memory()
        self.reset()

    def try_step(self, build: Build, group: Mapping[str, Any]) -> int:
        """Step a copy by a gradient of zeros, and return the memory that it needs, bytes.

        It compiles kernels now rather than in a step. On a CPU the memory is not measured.
        """
        copy = torch.nn.Parameter(self.weight.clone(), requires_grad=False)
        optimizer = build([{**group, "params": [copy]}])
        copy.grad = torch.zeros_like(copy)
        is_measured = copy.device.type == "cuda"
        before = torch.cuda.memory_allocated(copy.device) if is_measured else 0
        if is_measured:
            torch.cuda.reset_peak_memory_stats(copy.device)
        optimizer.step()
        num_bytes = torch.cuda.max_memory_allocated(copy.device) - before if is_measured else 0
        flat, paths = flatten_state_dict(dict(optimizer.state[copy]))
        self.strides = {name: v.stride() for name, v in flat.items() if torch.is_tensor(v)}
        self.is_fresh = optimizer.state[copy].keys() != self.optimizer.state[self.weight].keys()
        if self.is_fresh:
            self._paths, self.optimizer.state[self.weight] = paths, optimizer.state[copy]
        return num_bytes

    def step(self, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Step the matrix, whose weight and gradient have arrived."""
        self.optimizer.param_groups[0].update(group)
        if self.is_fresh:
            self.reset()
        else:
            names = [name for name in self._paths if self.prefix + name in state]
            flat = {name: state[self.prefix + name] for name in names}
            self.optimizer.state[self.weight] = unflatten_state_dict(flat, self._paths)
        # A seed per matrix and step: numbers from the generators of this rank would depend on the
        # matrices that it owns.
        seed = zlib.crc32(f"{self.name} {self._num_steps}".encode())
        torch.default_generator.manual_seed(seed)
        if self.weight.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self.weight.grad = self._gradient
        self.optimizer.step()
        self.weight.grad, self.is_fresh = None, False
        self._num_steps += 1
        self._restore_memory()
        state |= self.read_state()

    def reset(self) -> None:
        """Make the state anew, if the class does so before its first step."""
        self.optimizer.state.clear()
        if hasattr(self.optimizer, "_init_group"):
            self.optimizer._init_group(self.optimizer.param_groups[0], skip_non_grad_params=False)

    def read_state(self) -> dict[str, Any]:
        """Return the state by name in the state of the parameter: a tensor or a number each."""
        flat, paths = flatten_state_dict(dict(self.optimizer.state[self.weight]))
        self._paths |= paths
        return {self.prefix + name: value for name, value in flat.items()}

    def take_loaded(self, state: dict[str, Any]) -> None:
        """Prepare a state that was loaded, with the strides that a step leaves.

        Checkpoints do not store strides, and products of transposed matrices have other bits.
        """
        self.is_fresh = False
        for name, strides in self.strides.items():
            value = state.get(self.prefix + name)
            if torch.is_tensor(value) and value.stride() != strides:
                laid_out = value.new_empty_strided(value.shape, strides)
                state[self.prefix + name] = laid_out.copy_(value)

    def _restore_memory(self) -> None:
        """Copy the weight to the memory of the exchange if its class has replaced the tensor."""
        if self.weight.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self.weight)
            self.weight.data = self._memory


class WholeMatrices:
    """The matrices that this rank owns, and their exchange; in place of a ``MatrixStep``.

    Each matrix has an optimizer of its own: a class may have state in its attributes, such as a
    number of steps.

    Args:
        build: Builds an optimizer of parameter groups.
        ignored: Keys of groups that are not the optimizer's.

    Attributes:
        owned: The matrices, in the order of the exchange.
        params: By position, the parameters with local rows, once there is an engine.
        hooks: As in ``MatrixStep``, but never called.
        problems: Errors of the last exchange, as sentences.
        is_built: Whether they have their optimizers.
    """

    engine: Engine
    is_built: bool = False
    params: Sequence[Any]
    _workspace_bytes: int = 0
    _on_arrival: Callable[[_OwnedMatrix], None]

    def __init__(self, build: Build, ignored: Collection[str]) -> None:
        self._build, self._ignored = build, {*ignored, "params", "param_names"}
        self.owned: list[_OwnedMatrix] = []
        self.hooks: list[StepHooks] = []
        self.problems: list[str] = []

    def claim(
        self, param: torch.Tensor, name: str, weight: torch.Tensor, gradient: torch.Tensor
    ) -> Callable[[], None]:
        """Register a matrix; see ``MatrixOwner``."""
        owned = _OwnedMatrix(param, name, weight, gradient)
        self.owned.append(owned)

        def on_arrival() -> None:
            """Build the optimizer of the matrix in the first exchange, and step it afterwards."""
            try:
                devices = [weight.device] if weight.device.type == "cuda" else []
                with torch.random.fork_rng(devices):
                    self._on_arrival(owned)
            # Any error: other ranks wait for the results. All ranks raise it after the exchange.
            except Exception as error:
                logger.exception("%s:", name)
                self.problems.append(f"{name}: {first_line(error)}")

        return on_arrival

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
        tried: dict[torch.Size, _OwnedMatrix] = {}

        def build(owned: _OwnedMatrix) -> None:
            """Build an optimizer, and try it for a new shape, or if steps make its state."""
            group = self._options(groups[owned.param])
            owned.build(self._build, group)
            first = tried.setdefault(owned.weight.shape, owned)
            if first is owned or first.is_fresh:
                num_bytes = owned.try_step(self._build, group)
                self._workspace_bytes = max(self._workspace_bytes, num_bytes)
            else:
                owned.strides = first.strides

        self._on_arrival = build
        self._exchange(weights, weights, None)
        self.is_built = True

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

        def step(owned: _OwnedMatrix) -> None:
            """Step a matrix with a gradient."""
            if owned.param not in without:
                owned.step(self._options(groups[owned.param]), states[owned.param])

        self._on_arrival = step
        pairs = zip(weights, grads, strict=True)
        # Owners ignore the rows of a gradient that is missing.
        filled = [weight if grad is None else grad.float() for weight, grad in pairs]
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
        # The next step may have its gradients in other memory.
        self.forget()


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
        # The high bits identify the run, as its state must not be mixed with another run's.
        self._step_number = gather_objects(random.getrandbits(30))[0] << 32
        super().__init__(*args, **options)
        self._owner.build(self._group_of(), self._weights())
        # All ranks of the job construct.
        self._finish(None, "No optimizer was built.")
        self._create_state()

    def _make_matrix_step(self, rows_device: torch.device) -> WholeMatrices:
        for owned in self._owner.owned:
            suffix = owned.name.removeprefix(self._planned[owned.param].name).strip()
            owned.prefix = suffix and f"{suffix}."
        self._owner.attach(self.engine, self._params)
        return self._owner

    def _init_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Create no momentum."""

    def complete_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Add missing tensors to a state that was created or loaded, as the class makes them."""
        own = {param: state.setdefault(param, {}) for param in self._params}
        self._main_params.create(own)
        for values in own.values():
            values.setdefault(STEP_OF_ALL, self._step_number)
        for owned in self._owner.owned if self._owner.is_built else ():
            values = own[owned.param]
            if not owned.read_state().keys() <= values.keys():
                if not owned.is_fresh:
                    owned.reset()
                values |= owned.read_state()
            values.setdefault(owned.prefix + STEP_OF_OWNER, values[STEP_OF_ALL])

    def record_metrics(self, is_on: bool = True) -> None:
        """Refuse to record metrics, which describe the updates of Muon."""
        if is_on:
            raise ValueError("record_metrics: expected Muon, got optimizer_class. Leave it out")

    def follow_state(self) -> list[str]:
        """Create state that was removed; owners reset it alone, as nobody else has it."""
        problems = super().follow_state()
        self.removed.clear()
        return problems

    def use_loaded(self) -> None:
        """Prepare a state that was loaded."""
        states = self._states()
        self._step_number = max((values[STEP_OF_ALL] for values in states.values()), default=0)
        for owned in self._owner.owned:
            owned.take_loaded(states[owned.param])

    @torch.no_grad()
    def step(
        self,
        without: Collection[torch.Tensor] = (),
        overlap_fn: Callable[[], None] | None = None,
    ) -> None:
        """Update parameters by their gradients; called by all ranks together.

        Args:
            without: Parameters without a gradient on any rank. They keep value and state.
            overlap_fn: Called once, when the first rows are in transit.

        Raises:
            RuntimeError: On all ranks, if the class has raised on one.
        """
        groups, states = self._group_of(), self._states()
        self._step_number += 1
        for values in states.values():
            values[STEP_OF_ALL] = self._step_number
        for owned in self._owner.owned:
            states[owned.param][owned.prefix + STEP_OF_OWNER] = self._step_number
        self._owner.step(groups, states, self._weights(), self._grads(without), overlap_fn)
        advice = "Other matrices were stepped. Load weights and optimizer from a checkpoint."
        self._finish(self.group, advice)

    def _group_of(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {param: group for group in self._groups() for param in group["params"]}

    def _finish(self, group: dist.ProcessGroup | None, advice: str) -> None:
        """Round weights into parameters, and raise errors of owners on all ranks."""
        if self._main_params.params:
            self._main_params.install(self._states())
        raise_where_any_rank_fails(self._owner.problems, group, self.device, advice)
