# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Second moments in the state of an optimizer, and their part of a step.

NorMuon and NAMO themselves are in ``megatron_muon.newton_schulz.settings``, AdaMuon, which is
elementwise, in ``hooks``.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.newton_schulz.settings import Namo, NorMuon, Scale, StackMethod
from megatron_muon.rows.parameters import PlannedParameter, cutting_axes
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.tensors import as_shard, local_tensor
from megatron_muon.step.elementwise import TensorList
from megatron_muon.step.hooks import AdaMuon, StepHooks
from megatron_muon.step.matrix_step import MatrixStep
from megatron_muon.step.plan_inputs import PlanInputs

METHODS = ("adamuon", "normuon", "namo")
MOMENT2_BUFFER = "moment2_buffer"


def method_problems(method: object, weight_decay_method: str) -> list[str]:
    """List errors of a method, or of its name, a sentence each.

    Args:
        method: See ``SecondMoments``.
        weight_decay_method: Of the optimizer.
    """
    if method is None or (not isinstance(method, str) and isinstance(method, StackMethod)):
        return []
    if not isinstance(method, str):
        return [
            "adaptive: expected a name, or an object with state_shape() that is called with "
            f"results and state, got {method!r}. Write both methods"
        ]
    if method not in METHODS:
        return [f"adaptive: expected one of {', '.join(METHODS)}, got {method}. Choose one"]
    if method == "namo" and weight_decay_method == "l2":
        return [
            "adaptive: expected decoupled weight decay with namo, which averages norms of "
            "gradients, got l2, which adds the decay to them. Choose another"
        ]
    return []


class SecondMoments:
    """Second moments by parameter, in the state of an optimizer.

    adamuon keeps one value per element. Other methods have values per block: a vector, or
    ``(matrices, values)`` for a batch, equal on all ranks that exchange the parameter. It is a view
    of ``Moments``, which owners update.

    Args:
        method: Name of a method, a function of stacks with state, or None for none.
        beta2: Decay rate of a method with a name.
        eps: Keeps its divisor from zero.
        scale: Factors of results that are divided element by element.

    Attributes:
        method: Changes results of whole matrices; None for adamuon, which divides shards.
    """

    method: StackMethod | Namo | None

    def __init__(
        self, method: str | StackMethod | None, beta2: float, eps: float, scale: Scale
    ) -> None:
        self.is_elementwise = method == "adamuon"
        self.method = None if isinstance(method, str) else method
        if method in ("normuon", "namo"):
            self.method = (NorMuon if method == "normuon" else Namo)(beta2, eps)
        self.description = f"{method if isinstance(method, str) else type(method)} {beta2} {eps}"
        self._settings, self._scale = (beta2, eps), scale
        # Values of its plan, and index of its first matrix, by parameter.
        self._places: dict[torch.Tensor, tuple[Moments, int]] = {}
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        self._stored: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def attach(
        self,
        step: MatrixStep,
        plan_inputs: PlanInputs,
        state_of: Callable[[int], Mapping[str, Any]],
    ) -> list[StepHooks]:
        """Find the values of parameters among the values of plans.

        Args:
            step: The step.
            plan_inputs: Plans of this rank, and their parameters.
            state_of: Returns the state by position; loading replaces it.

        Returns:
            Additions to the step.
        """
        # Without a method plans have no values.
        for plan_input, parameters, moments in zip(
            plan_inputs.inputs, plan_inputs.parameters, step.engine.moments, strict=False
        ):
            counts, first = Counter(plan_input.params), 0
            for parameter in parameters:
                param, num = parameter.param, counts[parameter.param]
                self._places[param] = moments, first
                values = moments.values[slice(*moments.range_of(first, num))]
                self._views[param] = _sharded(parameter.view, values, len(plan_input.domain.ranks))
                self._stored[param] = self._stored_views(param)
                first += num
        if isinstance(self.method, Namo):
            return [GradientNorms(step.params, step.engine)]
        if not self.is_elementwise:
            return []
        factors = {
            parameter.param: self._scale(*self._scaled_shape(parameter))
            for parameter in itertools.chain(*plan_inputs.parameters)
        }
        return [
            AdaMuon(
                lambda position: local_tensor(state_of(position)[MOMENT2_BUFFER]),
                [factors[param] for param in step.params],
                *self._settings,
            )
        ]

    def _scaled_shape(self, parameter: PlannedParameter) -> Sequence[int]:
        """Return outputs and inputs by which results of a parameter are scaled."""
        shape = parameter.view.shape[-2:]
        return shape[::-1] if parameter.is_transposed else shape

    def create(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add missing tensors to a state that was created or loaded."""
        for param, values in state.items():
            if self.is_elementwise and "momentum_buffer" in values and MOMENT2_BUFFER not in values:
                values[MOMENT2_BUFFER] = torch.zeros_like(param, dtype=torch.float32)
        self.follow(state)

    def follow(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Read tensors that are not views of the values of plans: loaded, or offloaded since."""
        for param, views in self._stored.items():
            for name, view in views.items():
                own, stored = local_tensor(view), state[param].get(name)
                if stored is None:
                    own.zero_()
                else:
                    stored = local_tensor(stored)
                    if own.data_ptr() == stored.data_ptr():
                        continue
                    own.copy_(stored.view_as(own))
                # Another tensor in the same memory: its storage may be replaced too.
                state[param][name] = view.detach()

    def _stored_views(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter by name, views of the values of its plan."""
        return {MOMENT2_BUFFER: self._views[param]}

    def publish(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Complete a state before a save; nothing to do for views."""

    def collect(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Read a state that was loaded in place; nothing to do for views."""

    @contextmanager
    def preserve(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Restore the values of parameters at the end of a step, where no rank has a gradient."""
        views = [local_tensor(self._views[param]) for param in params if param in self._views]
        before = [view.clone() for view in views]
        yield
        for view, value in zip(views, before, strict=True):
            view.copy_(value)


def _sharded(view: torch.Tensor, values: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return values in the form of the state, given the values of the matrices of one domain."""
    if view.ndim == 2:
        return values
    num_matrices, num_domains = view.shape[0], 1
    placements: list[Any] = []
    if isinstance(view, DTensor):
        placements = [Replicate()] * view.device_mesh.ndim
        for axis in cutting_axes(view.placements, 0):
            # Other matrices of the batch are in plans of other ranks.
            if num_domains * num_ranks < view.device_mesh.size():
                num_domains *= view.device_mesh.size(axis)
                placements[axis] = view.placements[axis]
    rows = values.view(num_matrices // num_domains, -1)
    if num_domains == 1 or not isinstance(view, DTensor):
        return rows
    return as_shard(rows, view.device_mesh, placements, (num_matrices, rows.shape[1]))


class GradientNorms(StepHooks):
    """Show gradients to a method that needs their norms.

    Args:
        params: By position, the parameters with local rows.
        engine: Orthogonalizes their matrices.
    """

    def __init__(self, params: Sequence[torch.Tensor], engine: Engine) -> None:
        self._params, self._engine = list(params), engine

    def on_gradients(self, weights: TensorList, grads: Sequence[torch.Tensor | None]) -> None:
        """Sum squares, before gradients are overwritten."""
        by_param = dict(zip(self._params, grads, strict=True))
        for param, grad in by_param.items():
            if grad is None:
                # Moments of a parameter without a gradient are kept.
                local = local_tensor(param)
                by_param[param] = torch.zeros((), device=local.device).expand(local.shape)
        self._engine.see_gradients(
            {rows: rows.of(by_param[rows.param]) for rows in self._engine.handles}
        )
