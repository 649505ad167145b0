# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Second moments of an optimizer: its method, its additions to a step, and its state."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.fsdp2.scales import scale_function
from megatron_muon.newton_schulz.methods import Namo, StackMethod
from megatron_muon.rows.parameters import NamedParameter
from megatron_muon.rows.placements import cutting_axes
from megatron_muon.rows.plan_inputs import DTensorPlanInput
from megatron_muon.runtime.adamuon import AdaMuon
from megatron_muon.runtime.adaptive import GradientNorms, method_of
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import MatrixStep, StepHooks

KEY = "moment2_buffer"


class SecondMoments:
    """Second moments by parameter, in the state of an optimizer.

    adamuon has one like each parameter. Others have numbers for each block of a parameter, one
    after the other: a vector, or ``(matrices, numbers)`` for a batch. It is the same on all ranks
    that exchange the parameter. They are views of :class:`Moments`, which owners update.

    Args:
        given: Name of a method, a function of stacks with state, or None for none.
        beta2: Decay rate of a method with a name.
        eps: Keeps its divisor from zero.
        scale: Factors of a result by outputs and inputs of its matrix.
    """

    def __init__(
        self,
        given: str | StackMethod | None,
        beta2: float,
        eps: float,
        scale: Callable[[int, int], tuple[float, float]],
    ) -> None:
        self.method = method_of(given, beta2, eps) if isinstance(given, str) else given
        self.is_elementwise = given is not None and self.method is None
        self.description = f"{given if isinstance(given, str) else type(given)} {beta2} {eps}"
        self._settings, self._scale = (beta2, eps), scale
        # Results that are divided element by element are scaled afterwards.
        self.scale_of_results = scale_function("none", 1.0) if self.is_elementwise else scale
        self.hooks: list[StepHooks] = []
        self._views: dict[torch.Tensor, torch.Tensor] = {}

    def attach(
        self,
        step: MatrixStep,
        inputs: Sequence[DTensorPlanInput],
        named: Mapping[torch.Tensor, NamedParameter],
        state: Callable[[], Mapping[torch.Tensor, Mapping[str, Any]]],
    ) -> None:
        """Find the numbers of parameters among those of all plans, and add to a step.

        Args:
            step: The step.
            inputs: Of the plans.
            named: All parameters.
            state: Returns the state of the optimizer, which loading replaces.
        """
        for given, moments in zip(inputs, step.compute.moments, strict=False):
            counts, first = Counter(given.plan_input.params), 0
            for each in given.parameters:
                numbers = slice(*moments.range_of(first, counts[each.param]))
                self._views[each.param] = _sharded(each.view, moments.values[numbers], given)
                first += counts[each.param]
        if isinstance(self.method, Namo):
            self.hooks = [GradientNorms(step.params, step.compute)]
        if self.is_elementwise:
            held = [named[param] for param in step.params]
            shapes = [each.view.shape[-2:][:: -1 if each.is_transposed else 1] for each in held]
            factors = list(itertools.starmap(self._scale, shapes))
            self.hooks = [
                AdaMuon(
                    step.params,
                    lambda position: local_tensor(state()[step.params[position]][KEY]),
                    factors,
                    *self._settings,
                )
            ]
        step.hooks = self.hooks

    def create(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add what is missing to a state, and make numbers that were loaded those of the plans."""
        for param, of_param in state.items():
            if self.is_elementwise and "momentum_buffer" in of_param and KEY not in of_param:
                of_param[KEY] = torch.zeros_like(param, dtype=torch.float32)
        for param, view in self._views.items():
            local_tensor(view).copy_(local_tensor(state[param].get(KEY, view)))
            state[param][KEY] = view

    @contextmanager
    def kept(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep the numbers of parameters, such as those without a gradient, for a step."""
        views = [local_tensor(self._views[param]) for param in params if param in self._views]
        before = [view.clone() for view in views]
        yield
        for view, value in zip(views, before, strict=True):
            view.copy_(value)


def _sharded(view: torch.Tensor, values: torch.Tensor, given: DTensorPlanInput) -> torch.Tensor:
    """Return numbers as they are saved, given those of the matrices of one domain."""
    if view.ndim == 2:
        return values
    num_matrices, num_domains = view.shape[0], 1
    placements: list[Any] = []
    if isinstance(view, DTensor):
        placements = [Replicate()] * view.device_mesh.ndim
        for axis in cutting_axes(view.placements, 0):
            # Other matrices of the batch are in plans of other ranks.
            if num_domains * len(given.plan_input.domain.ranks) < view.device_mesh.size():
                num_domains *= view.device_mesh.size(axis)
                placements[axis] = view.placements[axis]
    rows = values.view(num_matrices // num_domains, -1)
    if num_domains == 1 or not isinstance(view, DTensor):
        return rows
    return DTensor.from_local(
        rows,
        view.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size((num_matrices, rows.shape[1])),
        stride=(rows.shape[1], 1),
    )
