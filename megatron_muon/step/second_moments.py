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
from functools import partial
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from torch.optim.optimizer import ParamsT

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings, NorMuon, Scale, StackMethod
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.stack_task import checked_result
from megatron_muon.step.hooks import AdaMuonSettings
from megatron_muon.step.matrix_step import StepSettings
from megatron_muon.step.muon_step import MuonSettings
from megatron_muon.step.owner_state import MOMENT2_OF_OWNER, StateOwner, States
from megatron_muon.step.whole_matrix import whole_matrix_settings

METHODS = ("adamuon", "normuon", "namo")
_OF_STEP = ("nesterov", "weight_decay_method", "fp32_matmul_prec")


# Settings that NAMO can have, which owners step by the class of emerging-optimizers. It refuses l2,
# which adds decay to gradients, whose norms NAMO averages.
_OF_NAMO: Mapping[str, tuple[object, ...]] = {
    "weight_decay_method": ("decoupled", "independent", "palm"),
    "momentum_dtype": (torch.float32,),
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
        """Add zeros if there are none; torch loads a state to the device of the parameter."""
        key = self.prefix + MOMENT2_OF_OWNER
        state[key] = state.get(key, torch.zeros(self._shape, dtype=torch.float32)).to(self._device)


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


def muon_settings(
    arguments: Mapping[str, Any],
    scale: Scale,
    factors: Callable[[PlannedParameter], tuple[float, float]],
    exchange: ExchangeSettings,
    ignored: Collection[str] = (),
    **options: Any,  # noqa: ANN401 - of StepSettings
) -> MuonSettings:
    """Return the settings of the step of Muon, and of its methods.

    Args:
        arguments: Of ``fsdp2.MuonArguments``, by name; they may lack ``newton_schulz``.
        scale: Scale of results.
        factors: Of updates of a parameter of AdaMuon.
        exchange: How matrices are exchanged.
        ignored: Keys of groups that are not the optimizer's.
        options: Other settings of the step.
    """
    method, beta2, eps = (arguments[name] for name in ("adaptive", "beta2", "eps"))
    of_step = {name: arguments[name] for name in _OF_STEP}
    kind = method if isinstance(method, str) else type(method).__name__
    scaling = f"{arguments['scale_mode']} {arguments['extra_scale_factor']}"
    description = f"{scaling}, adaptive {kind} {beta2} {eps}"
    if method == "namo":
        names = ("num_ns_steps", "coefficient_type", "beta2", "eps")
        of_namo = of_step | {name: arguments[name] for name in names}
        build = partial(Namo, scale=scale, **of_namo)
        return whole_matrix_settings(build, ignored, exchange, f"{scaling}, {of_namo}")
    if method == "normuon":
        method = NorMuon(beta2, eps)
    function = arguments.get("newton_schulz")
    newton_schulz = NewtonSchulzSettings(
        arguments["num_ns_steps"],
        arguments["coefficient_type"],
        # Then rows may be sent in bf16.
        arguments["fp32_matmul_prec"] == "medium" and function is None,
        scale,
        function,
        None if method is None or isinstance(method, str) else StackMoments(method),
    )
    of_momentum = {name: arguments[name] for name in ("momentum_dtype", "offload_state")}
    step = StepSettings(**of_step, **of_momentum, **options)
    adamuon = AdaMuonSettings(beta2, eps, factors) if method == "adamuon" else None
    return MuonSettings(newton_schulz, exchange, step, description, adamuon)
