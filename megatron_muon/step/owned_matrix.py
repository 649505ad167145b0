# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A whole matrix on its owner, stepped by an optimizer of its own."""

import copy
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from emerging_optimizers import registry
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from megatron_muon.step.elementwise import step_without_hooks

logger = logging.getLogger(__name__)

# Whether the state of a matrix is as of an optimizer that has not stepped: its next step makes it.
IS_FRESH = "is_fresh"
# Builds an optimizer of parameter groups.
type Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Packages of emerging-optimizers whose import registers their classes.
_PACKAGES = (
    *("orthogonalized_optimizers", "psgd", "riemannian_optimizers", "scalar_optimizers"),
    "soap",
)


def registered_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of emerging-optimizers by its registered name.

    Raises:
        ValueError: No class has this name.
    """
    for package in _PACKAGES:
        importlib.import_module(f"emerging_optimizers.{package}")
    names = registry.get_optimizer_name_list()
    if name not in names:
        raise ValueError(
            f"optimizer_class: expected a class, or one of {sorted(names)}, got {name!r}. Pass one"
        )
    return registry.get_optimizer_cls(name)


class OwnedMatrix:
    """A matrix that this rank owns, and the optimizer that steps it.

    Args:
        param: The parameter that it belongs to.
        name: Name of the matrix.
        weight: ``(rows, cols)`` float32, memory of the exchange.
        gradient: The same.

    Attributes:
        weight: A view of that memory, for the optimizer.
        gradient: As given.
        prefix: Of the names of its state, in the state of the parameter.
        optimizer: Its optimizer, once it is built.
        pattern: Its state after a step by name: functions that allocate tensors, and other values.
    """

    optimizer: torch.optim.Optimizer
    prefix: str = ""
    pattern: Mapping[str, Any] | None = None
    # Whether its optimizer has made no step: its state is as the constructor has left it.
    _is_new: bool = True

    def __init__(
        self, param: torch.Tensor, name: str, weight: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        self.param, self.name, self._memory, self.gradient = param, name, weight, gradient
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._paths: dict[str, Any] = {}  # keys of nested state, by name

    def build(self, build: Build, group: Mapping[str, Any]) -> None:
        """Build the optimizer, which may read the weight, and change it."""
        self.optimizer = build([{**group, "params": [self.weight]}])
        self._keep()
        init_group: Any = getattr(self.optimizer, "_init_group", None)
        # Other classes have it with other arguments.
        if init_group and "skip_non_grad_params" in inspect.signature(init_group).parameters:
            init_group(self.optimizer.param_groups[0], skip_non_grad_params=False)

    def try_step(self, build: Build, group: Mapping[str, Any]) -> int:
        """Step a copy, and return the memory that it needs, bytes.

        It compiles kernels now rather than in a step. On a CPU the memory is not measured.

        Raises:
            ValueError: The class changes its groups: each step sets them to this optimizer's.
        """
        copied = torch.nn.Parameter(self.weight.clone(), requires_grad=False)
        optimizer = build([{**group, "params": [copied]}])
        copied.grad = torch.randn_like(copied)
        before = {key: str(value) for key, value in _settings(optimizer).items()}
        is_measured = copied.device.type == "cuda"
        num_before = torch.cuda.memory_allocated(copied.device) if is_measured else 0
        if is_measured:
            torch.cuda.reset_peak_memory_stats(copied.device)
        step_without_hooks(optimizer)
        num_bytes = 0
        if is_measured:
            num_bytes = torch.cuda.max_memory_allocated(copied.device) - num_before
        if changed := [k for k, v in _settings(optimizer).items() if str(v) != before.get(k)]:
            raise ValueError(
                f"optimizer_class: expected a class that keeps what it computes in the state of "
                f"parameters, got one that changes {changed} of groups. Change the class"
            )
        flat, self._paths = flatten_state_dict(dict(optimizer.state[copied]))
        self.pattern = {
            name: partial(torch.empty_strided, v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if type(v) is torch.Tensor
            else v
            for name, v in flat.items()
        }
        return num_bytes

    def follow(self, like: "OwnedMatrix") -> None:
        """Take the pattern of another matrix."""
        self.pattern, self._paths = like.pattern, dict(like._paths)

    def step(self, build: Build, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Step the matrix, whose weight and gradient have arrived."""
        # After an error it may be another tensor.
        self.weight.data = self._memory
        if not state.get(self.prefix + IS_FRESH, True):
            names = [name for name in self._paths if self.prefix + name in state]
            flat = {name: state[self.prefix + name] for name in names}
            self.optimizer.state[self.weight] = unflatten_state_dict(flat, self._paths)
        elif not self._is_new:
            self.build(build, group)
        self.optimizer.param_groups[0].update(group)
        self.weight.grad, self._is_new = self.gradient, False
        step_without_hooks(self.optimizer)
        self.weight.grad = None
        self._keep()
        made = self._read_state()
        if late := made.keys() - state.keys():
            logger.warning(
                "%s: state %s is no state of a first step: new optimizers load none of it.",
                self.name,
                sorted(late),
            )
        state |= made | {self.prefix + IS_FRESH: False}

    def complete(self, state: dict[str, Any]) -> None:
        """Add a fresh state, for loads, where it is incomplete: a step makes it anew."""
        pattern = self.pattern
        # Without a pattern its optimizer has not been built.
        if pattern is None or {self.prefix + key for key in (*pattern, IS_FRESH)} <= state.keys():
            return
        made = self._read_state() if self._is_new else {}
        blank = {
            self.prefix + name: value() if isinstance(value, partial) else copy.deepcopy(value)
            for name, value in pattern.items()
            if self.prefix + name not in made
        }
        state |= {**blank, **made, self.prefix + IS_FRESH: True}

    def _read_state(self) -> dict[str, Any]:
        """Return the state by name in the state of the parameter."""
        flat, paths = flatten_state_dict(dict(self.optimizer.state[self.weight]))
        self._paths |= paths
        # The memory of the exchange is freed, and written by others.
        memory = self._memory.untyped_storage().data_ptr()
        return {
            self.prefix + name: value.clone()
            if type(value) is torch.Tensor and value.untyped_storage().data_ptr() == memory
            else value
            for name, value in flat.items()
        }

    def take_loaded(self, state: dict[str, Any]) -> None:
        """Take a state that was loaded, in the layout of memory that steps leave.

        Products of transposed matrices have other bits, and checkpoints know no strides. Numbers of
        steps may be in CPU memory.
        """
        for name, make in (self.pattern or {}).items():
            value = state.get(self.prefix + name)
            if isinstance(make, partial) and torch.is_tensor(value):
                own = {"dtype": value.dtype, "device": value.device}
                if value.stride() != make.args[1] or own != make.keywords:
                    state[self.prefix + name] = make().copy_(value)

    def _keep(self) -> None:
        """Write the weight to the memory of the exchange, if its class has replaced its tensor."""
        if self.weight.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self.weight)
            self.weight.data = self._memory


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: value for k, value in optimizer.param_groups[0].items() if k != "params"}
