# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods that divide results of Newton-Schulz by second moments.

========  ===========================================================================
adamuon   elementwise: ``AdaMuon`` of ``hooks``
normuon   rows or columns: ``StackMoments``, as for a ``StackMethod`` of a user
namo      norms of whole gradients: ``Namo``, which owners step as an optimizer
========  ===========================================================================
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from torch.optim.optimizer import ParamsT

from megatron_muon.newton_schulz.settings import NorMuon, Scale, StackMethod
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.stack_task import checked_result
from megatron_muon.step.owner_state import StateOwner, States

METHODS = ("adamuon", "normuon", "namo")
MOMENT2_BUFFER = "moment2_buffer"
# State of a ``StackMethod``, on the owner of the matrix.
MOMENT2_OF_OWNER = "moment2_of_owner"


# Settings that NAMO can have, which owners step by the class of emerging-optimizers. It refuses l2,
# which adds decay to gradients, whose norms NAMO averages.
_OF_NAMO: Mapping[str, tuple[object, ...]] = {
    "weight_decay_method": ("decoupled", "independent", "palm"),
    "momentum_dtype": (torch.float32,),
    "offload_momentum": (False,),
    "newton_schulz": (None,),
    "exchange.newton_schulz": ("standard",),
    "exchange.comm_dtype": ("auto", "fp32"),
}


def method_problems(
    method: object, settings: Mapping[str, object], exchange: ExchangeSettings
) -> list[str]:
    """List errors of a method, or of its name, a sentence each.

    Args:
        method: Name of a method, a ``StackMethod``, or None for none.
        settings: Other settings of the optimizer; absent ones are allowed.
        exchange: How matrices are exchanged.
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
    settings = {**settings, **{f"exchange.{name}": value for name, value in vars(exchange).items()}}
    return [
        f"{name}: expected {' or '.join(map(str, choices))} with namo, got {settings[name]}. "
        "Choose another, or another method"
        for name, choices in _OF_NAMO.items()
        if method == "namo" and settings.get(name, choices[0]) not in choices
    ]


class _Moments:
    """State of a method for one matrix; see ``OwnedState``."""

    prefix: str = ""
    values: torch.Tensor  # of a step

    def __init__(
        self, param: torch.Tensor, name: str, shape: Sequence[int], device: torch.device
    ) -> None:
        self.param, self.name, self._shape, self._device = param, name, shape, device

    def complete(self, state: dict[str, Any]) -> None:
        """Add zeros if there are none."""
        if self.prefix + MOMENT2_OF_OWNER not in state:
            state[self.prefix + MOMENT2_OF_OWNER] = torch.zeros(self._shape, device=self._device)

    def take_loaded(self, state: dict[str, Any]) -> None:
        """Move a state to the device; torch loads it to the device of the parameter."""
        key = self.prefix + MOMENT2_OF_OWNER
        state[key] = state[key].to(self._device)


class StackMoments(StateOwner):
    """Owner that changes results of Newton-Schulz by a method, and keeps its state.

    Args:
        method: The method.
    """

    num_inputs = 1

    def __init__(self, method: StackMethod) -> None:
        self._method = method
        self.owned: list[_Moments] = []
        self._without: Collection[torch.Tensor] = ()

    def claim(
        self, matrices: Sequence[tuple[torch.Tensor, str]], *stacks: torch.Tensor
    ) -> Callable[[Callable[[], None]], None]:
        """Register a stack; see ``MatrixOwner``."""
        (stack,) = stacks
        shape = self._method.state_shape(*stack.shape[1:])
        owned = [_Moments(*matrix, shape, stack.device) for matrix in matrices]
        self.owned += owned

        def act(orthogonalize: Callable[[], None]) -> None:
            """Orthogonalize the stack, and call the method."""
            orthogonalize()
            state = torch.stack([own.values for own in owned])
            results = self._method(stack, state)
            stack.copy_(checked_result(results, stack, type(self._method).__name__))
            for own, new in zip(owned, state, strict=True):
                # Momentum without a gradient is exchanged all the same.
                if own.param in self._without:
                    new.copy_(own.values)
            torch._foreach_copy_([own.values for own in owned], list(state.unbind()))

        return act

    def advance(self, states: States, without: Collection[torch.Tensor]) -> None:
        """Count a step, and read the state, which users and loading replace."""
        super().advance(states, without)
        self._without = without
        for own in self.owned:
            own.values = states[own.param][own.prefix + MOMENT2_OF_OWNER]


class Namo(AdaptiveMuon):
    """NAMO of emerging-optimizers, scaled as ``Muon``.

    Args:
        params: Groups with ``lr``, ``momentum`` and ``weight_decay``, and maybe ``transposed``.
        scale: Returns the factors of an update by outputs and inputs.
        options: As there.
    """

    def __init__(self, params: ParamsT, scale: Scale, **options: Any) -> None:  # noqa: ANN401
        super().__init__(params, 0.0, 0.0, 0.0, moment2_method="namo", **options)
        self._scale = scale

    def _apply_muon_scale(self, update: torch.Tensor, size_out: int, size_in: int) -> torch.Tensor:
        is_transposed = self.param_groups[0].get("transposed", False)
        sizes = (size_in, size_out) if is_transposed else (size_out, size_in)
        for factor in self._scale(*sizes):
            update = update * factor
        return update


def stack_owner(method: str | StackMethod | None, beta2: float, eps: float) -> StackMoments | None:
    """Return the owner of a method that changes stacks of results, or None for other methods."""
    if method == "normuon":
        method = NorMuon(beta2, eps)
    return None if method is None or isinstance(method, str) else StackMoments(method)
