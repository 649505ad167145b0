# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of Muon, as settings of its step, and keys of parameter groups."""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from emerging_optimizers.utils import FP32MatmulPrecT

from megatron_muon.fsdp2.gradients import CHECKS
from megatron_muon.fsdp2.parameters import Group, as_split_sizes
from megatron_muon.newton_schulz.settings import Scale, StackMethod
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.agreement import first_line
from megatron_muon.step.elementwise import (
    SCALE_MODES,
    WEIGHT_DECAY_METHODS,
    WeightDecayMethod,
    scale_function,
)
from megatron_muon.step.muon_step import MuonSettings, MuonStep
from megatron_muon.step.owned_matrix import registered_class
from megatron_muon.step.second_moments import method_problems, muon_settings
from megatron_muon.step.whole_matrix import WholeMatrixStep, whole_matrix_settings

# Keys of other optimizers, such as torch.optim.Muon, dion, xtuner and nanochat, with their names
# here.
_RENAMED = {
    "adjust_lr": "scale_mode",
    "adjust_lr_fn": "scale_mode",
    "beta1": "betas",
    "cautious_wd": "weight_decay_method",
    "epsilon": "eps",
    "kind": "algorithm",
    "learning_rate": "lr",
    "mu": "momentum",
    "muon_split_sizes": "split_sizes",
    "newton_schulz_func": "newton_schulz",
    "newton_schulz_steps": "num_ns_steps",
    "ns_coefficients": "coefficient_type",
    "ns_steps": "num_ns_steps",
    "num_experts": "split_sizes",
    "num_heads": "split_sizes",
    "splits": "split_sizes",
    "use_muon": "algorithm",
    "use_nesterov": "nesterov",
    "wd": "weight_decay",
}
# Keys of a group of Muon that decide the plan, with their defaults.
PLANNED: Group = {"split_sizes": None, "transposed": False, "flatten": False}
_ADAMW = frozenset(inspect.signature(torch.optim.AdamW).parameters) - {"params"}
_COMMON = {"params", "param_names", "lr", "weight_decay"}
# Keys that change no result, or that torch checks.
_WITHOUT_VALUES = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
# Upper bounds of numbers that are at least 0.
_BOUNDS = {"lr": math.inf, "weight_decay": math.inf, "momentum": 1.0}
# Keys of groups of Muon that an ``optimizer_class`` may lack.
_OF_CLASS = frozenset({"weight_decay", "momentum"})
# Keys that a step reads, by algorithm.
_READ = {
    "muon": _COMMON | PLANNED.keys() | {"momentum"},
    "adamw": _COMMON | _ADAMW | {"decoupled_weight_decay"},
    "lion": _COMMON | {"betas"},
}


def key_problems(
    group: Group, algorithm: str, settings: Group, *, is_new: bool = False
) -> list[str]:
    """List keys of a parameter group that a step would ignore, or cannot use, a sentence each.

    Tools add keys of their own, such as ``initial_lr`` or ``lr_scale``: all are accepted except
    arguments of optimizers, and misspelled keys.

    Args:
        group: The group, or one that is loaded.
        algorithm: Its algorithm.
        settings: Settings that all groups of Muon share, by name.
        is_new: Whether it is the user's. Schedules may leave the range of a number by its rounding,
            and set momentum in all groups.
    """
    problems = []
    for key, value in group.items():
        bound = _BOUNDS.get(key)
        # The host would wait for the device to compare a tensor.
        is_scalar = isinstance(value, numbers.Real | torch.Tensor) and not getattr(value, "ndim", 0)
        if bound is not None and not (is_scalar and (not is_new or 0.0 <= value < bound)):
            problems.append(
                f"{key}: expected a number, at least 0 and less than {bound}, got {value!r}. "
                "Pass another"
            )
        if is_new and algorithm == "muon" and key in _OF_CLASS.difference(settings["keys"]):
            problems.append(f"{key}: expected a key of optimizer_class, got {value!r}. Remove it")
        is_read = key in _READ[algorithm] or (key == "momentum" and not is_new)
        is_read |= algorithm == "muon" and key in settings["keys"]
        if is_read or (remedy := _remedy(key, algorithm)) is None:
            continue
        expected = f"no such key in a group of {algorithm}"
        if algorithm == "muon" and key in settings:
            expected = f"{settings[key]}, the setting of all groups of Muon"
            # Not the values: tensors and functions are compared otherwise.
            if str(value) == str(settings[key]):
                continue
        problems.append(f"{key}: expected {expected}, got {value!r}. {remedy}")
    return problems


def values_of(
    param_groups: Sequence[Group], algorithms: Sequence[str], settings: Group
) -> dict[torch.Tensor, str]:
    """Describe by parameter the values of its group that change what its step computes.

    Args:
        param_groups: Parameter groups.
        algorithms: Their algorithms.
        settings: Settings of all groups.
    """
    texts = {}
    for group, algorithm in zip(param_groups, algorithms, strict=True):
        read = _READ[algorithm] | (set(settings["keys"]) if algorithm == "muon" else set())
        # Plans are compared when they are made.
        keys = sorted(read & group.keys() - PLANNED.keys() - _WITHOUT_VALUES)
        text = ", ".join([algorithm, *(f"{key} {group[key]}" for key in keys)])
        texts.update(dict.fromkeys(group["params"], text))
    return texts


def layout_of(group: Group) -> dict[str, Any]:
    """Return the keys of a group of Muon that decide the plan."""
    return {key: as_split_sizes(group.get(key, value)) for key, value in PLANNED.items()}


@functools.cache
def _remedy(key: str, algorithm: str) -> str | None:
    """Return the remedy for a key that no step reads, or None for the key of a tool."""
    classes = (AdaptiveMuon, torch.optim.Muon, torch.optim.SGD, torch.optim.AdamW)
    known = set().union(*_READ.values(), MuonArguments.__dataclass_fields__, {"algorithm"})
    known = known.union(*(inspect.signature(optimizer).parameters for optimizer in classes))
    name = _RENAMED.get(key, key)
    if name not in known:
        near = difflib.get_close_matches(key, known, 1, 0.85)
        # max_momentum is the key of a schedule, momentun is none.
        if not near or set(near[0].split("_")) <= set(key.split("_")):
            return None
        name = near[0]
    if name in _READ[algorithm]:
        return f"Write {name}; a key of your own needs a name that differs more"
    return (
        f"Pass {name} to the constructor of an optimizer that has it, or choose another algorithm "
        "for these parameters"
    )


# Arguments that other classes than Muon have too, or that ``MuonAdamW`` sets.
_FOR_ALL_CLASSES = {
    *("exchange", "process_group", "tensor_group", "check_gradients", "offload_state"),
    *("optimizer_class", "optimizer_options", "nesterov", "scale_mode"),
}
# Default of the EMA coefficient of Muon.
MOMENTUM = 0.95
_OF_MUON_ALONE = (
    "{}: expected no argument of Muon with optimizer_class, got {}. Pass it in optimizer_options, "
    "if the class has it"
)


@dataclass(frozen=True, kw_only=True)
class MuonArguments:
    """Keyword arguments of ``Muon``, which ``MuonAdamW`` takes too.

    Args:
        nesterov: Whether the gradient is averaged into the momentum once more.
        weight_decay_method: ``decoupled``, ``independent``, ``palm`` or ``l2`` of
            emerging-optimizers, or ``cautious``: decoupled, where update and weight have the same
            sign (arXiv:2510.12402).
        fp32_matmul_prec: Precision of Newton-Schulz; ``medium`` is bf16.
        coefficient_type: Name of emerging-optimizers' coefficients.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: Scale of results by shape: ``spectral``, ``shape_scaling``,
            ``unit_rms_norm`` (``spectral_unclamped`` in torch), ``match_adamw`` (``spectral`` times
            0.2, the update size of AdamW), or ``none``.
        extra_scale_factor: Another factor of results.
        use_syrk: Must be False; see ``exchange.newton_schulz``.
        exchange: Settings of the exchange; None for the defaults.
        process_group: Ranks with copies of this rank's plain tensors, as under DDP.
        tensor_group: Ranks with the other shards of plain tensors with a ``partition_dim`` of 0 or
            1 (tensor parallelism of Transformer Engine or Megatron), in the order of the shards,
            also uneven ones. Other parameters are the same on all of them.
        newton_schulz: Orthogonalizes stacks ``(num_matrices, rows, cols)`` of float32 matrices in
            place of Newton-Schulz. Matrices are then sent in fp32, and not split.
        adaptive: Divides results by second moments: ``normuon``, ``namo`` or ``adamuon`` of
            emerging-optimizers' ``AdaptiveMuon``; or a ``StackMethod``.
        beta2: Decay rate of the second moment.
        eps: Lower bound of its divisor.
        momentum_dtype: bfloat16 halves the memory of momentum. It is averaged in float32, and
            rounded once a step.
        offload_state: Whether the state of all parameters is in pinned CPU memory between steps. A
            step copies it to the device and back, and the host waits for it in the end.
        check_gradients: When a step refuses gradients that are not finite: ``sync``, before
            anything changes, for which the host waits; ``next_step``, in the next step, without a
            wait; ``off``, never. See docs/fsdp2.md.
        optimizer_class: Steps matrices in place of Muon: a class of optimizers of 2-D tensors, or
            the registered name of one of emerging-optimizers, such as ``soap``. The owner of a
            matrix steps the whole of it, and keeps its state (docs/optimizers.md). Other arguments
            of this class but ``exchange``, groups and ``check_gradients`` are Muon's alone.
        optimizer_options: Its arguments, but ``lr`` and ``weight_decay``.

    Raises:
        TypeError: An unknown argument.
    """

    nesterov: bool = False
    weight_decay_method: WeightDecayMethod = "decoupled"
    fp32_matmul_prec: FP32MatmulPrecT = "medium"
    coefficient_type: str = "quintic"
    num_ns_steps: int = 5
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    use_syrk: bool = False
    exchange: ExchangeSettings | None = None
    process_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    newton_schulz: Callable[[torch.Tensor], torch.Tensor] | None = None
    adaptive: str | StackMethod | None = None
    beta2: float = 0.95
    eps: float = 1e-8
    momentum_dtype: torch.dtype = torch.float32
    offload_state: bool = False
    check_gradients: str = "sync"
    optimizer_class: str | type[torch.optim.Optimizer] | None = None
    optimizer_options: Mapping[str, Any] | None = None

    def build_whole(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build an ``optimizer_class`` of whole matrices, given groups with their settings."""
        optimizer: Any = self.optimizer_class
        if isinstance(optimizer, str):
            optimizer = registered_class(optimizer)
        parameters = inspect.signature(optimizer).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        common = {
            key: groups[0][key]
            for key in ("lr", "weight_decay")
            if key in groups[0] and (takes_any or key in parameters)
        }
        built: torch.optim.Optimizer = optimizer(groups, **common, **(self.optimizer_options or {}))
        return built

    def group_defaults(self, of_muon: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of groups of matrices, given Muon's."""
        if self.optimizer_class is None:
            return dict(of_muon)
        if of_muon["momentum"] != MOMENTUM:
            raise ValueError(_OF_MUON_ALONE.format("momentum", of_muon["momentum"]))
        matrix = torch.nn.Parameter(torch.ones(1, 1))
        try:
            return self.build_whole([{"params": [matrix], **of_muon}]).defaults
        # Any error: other ranks are still in the constructor.
        except Exception as error:
            raise ValueError(f"optimizer_class: {first_line(error)}") from error

    @property
    def step_class(self) -> type[MuonStep]:
        """Class of the step of matrices."""
        is_whole = self.optimizer_class is not None or self.adaptive == "namo"
        return WholeMatrixStep if is_whole else MuonStep

    @property
    def _scale(self) -> Scale:
        return scale_function(self.scale_mode, self.extra_scale_factor)

    @property
    def settings(self) -> MuonSettings:
        """Settings of the step."""
        exchange = self.exchange or ExchangeSettings()
        # Ranks that check join collectives more.
        check = f"check_gradients {self.check_gradients}"
        if self.optimizer_class is not None:
            description = f"{self.optimizer_class} {self.optimizer_options}, {check}"
            return whole_matrix_settings(
                self.build_whole,
                PLANNED,
                exchange,
                description,
                offload_state=self.offload_state,
            )
        # Results of AdaMuon are scaled after they were divided.
        scale = scale_function("none", 1.0) if self.adaptive == "adamuon" else self._scale
        # NAMO is scaled by outputs and inputs.
        ignored = PLANNED.keys() - {"transposed"}
        settings = muon_settings(vars(self), scale, self._factors, exchange, ignored)
        return replace(settings, description=f"{settings.description}, {check}")

    def _factors(self, parameter: PlannedParameter) -> tuple[float, float]:
        """Return the factors of updates of AdaMuon."""
        shape = parameter.view.shape[-2:]
        return self._scale(*(shape[::-1] if parameter.is_transposed else shape))

    def check(self) -> None:
        """Raise a ValueError for invalid arguments.

        Emerging-optimizers reports unknown names only in the first step, after weight decay, while
        other ranks wait.
        """
        choices_by_name = {
            "weight_decay_method": sorted(WEIGHT_DECAY_METHODS),
            "fp32_matmul_prec": sorted(get_args(FP32MatmulPrecT)),
            "scale_mode": sorted(SCALE_MODES),
            "momentum_dtype": [torch.float32, torch.bfloat16],
            "check_gradients": list(CHECKS),
        }
        problems = [
            f"{name}: expected one of {choices}, got {value!r}. Choose one"
            for name, choices in choices_by_name.items()
            if (value := getattr(self, name)) not in choices
        ]
        steps = self.num_ns_steps
        if steps < 1:
            problems.append(f"num_ns_steps: expected at least 1, got {steps}. Pass more")
        if self.use_syrk:
            problems.append(
                "use_syrk: expected False, got True. Pass "
                'exchange=ExchangeSettings(newton_schulz="gram") for fewer operations'
            )
        exchange = self.exchange or ExchangeSettings()
        problems += method_problems(self.adaptive, vars(self), exchange)
        for field in fields(self) if self.optimizer_class is not None else ():
            value = getattr(self, field.name)
            if field.name not in _FOR_ALL_CLASSES and value != field.default:
                problems.append(_OF_MUON_ALONE.format(field.name, repr(value)))
        if self.optimizer_class is None and self.optimizer_options is not None:
            problems.append(
                f"optimizer_options: expected an optimizer_class with them, got "
                f"{self.optimizer_options!r} alone. Pass both"
            )
        if problems:
            raise ValueError("; ".join(problems))
        settings, function = self.settings, self.newton_schulz
        if function is not None and (
            not callable(function) or exchange.newton_schulz != "standard"
        ):
            raise ValueError(
                f"newton_schulz: expected a function of a stack, got {function!r} and "
                f"exchange.newton_schulz {exchange.newton_schulz}. Pass a function, or a name there"
            )
        # Both raise.
        settings.exchange.comm_dtypes(settings.newton_schulz.is_bf16)
        _ = settings.newton_schulz.coefficients
