# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""State and settings of Muon by others, in names: what becomes what, without tensors.

==========  ===================  =================================  ==============================
optimizer   momentum             recurrence, with ``mu``            AdamW's states
==========  ===================  =================================  ==============================
fsdp2       ``momentum_buffer``  average ``mu * m + (1 - mu) * g``  torch's
torch       ``momentum_buffer``  average                            torch's, another optimizer
dion        ``momentum``         sum ``mu * m + g``                 momentum, variance, step_dev
xtuner      ``momentum``         sum                                momentum, variance
==========  ===================  =================================  ==============================

An average is a sum times ``1 - mu``, if ``mu`` never changed. AdamW is the same everywhere, so its
values are kept, under the names of the optimizer that reads them.

Source: ``torch/optim/_muon.py`` of pytorch/pytorch (``lerp_``); ``dion/muon.py``
(``muon_update_pre_orthogonalize``), ``dion/megabatch_base.py`` and ``dion/scalar_opts.py`` of
microsoft/dion at 0a059a45; ``xtuner/v1/optim/muon.py`` of InternLM/xtuner at b934f462.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.checkpoint.folders import CheckpointError


@dataclass(frozen=True)
class _Names:
    """Names of an optimizer's state, and of ``mu`` in its groups."""

    momentum: str
    mu: str
    is_sum: bool
    adamw: dict[str, str]  # torch's name by that of the optimizer
    ignored: frozenset[str] = frozenset()  # follows from settings


_TORCH_ADAMW = {name: name for name in ("exp_avg", "exp_avg_sq", "step")}
_MOMENTS = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
OPTIMIZERS = {
    "fsdp2": _Names("momentum_buffer", "momentum", False, _TORCH_ADAMW),
    "torch": _Names("momentum_buffer", "momentum", False, _TORCH_ADAMW),
    "dion": _Names("momentum", "mu", True, {**_MOMENTS, "step_dev": "step"}),
    "xtuner": _Names("momentum", "mu", True, _MOMENTS, frozenset({"lr_ratio"})),
}
_KEPT_SETTINGS = ("lr", "initial_lr", "weight_decay", "params", "param_names")
_STATE = re.compile(r"state\.(.+)\.([^.]+)$")
_GROUP = re.compile(r"param_groups\.(.+)\.([^.]+)$")
# Instead of None, which is a value of AdamW's settings.
COPY = object()


@dataclass(frozen=True)
class Change:
    """Where a value of the result comes from.

    Args:
        key: The key that is copied, or beside which a new value stands.
        factor: Multiplied with its elements.
        value: A new value, or ``COPY`` to copy the one of ``key``.
    """

    key: str
    factor: float = 1.0
    value: Any = COPY


@dataclass(frozen=True)
class _Group:
    name: str
    keys: dict[str, str]  # by setting
    params: list[str]
    is_muon: bool


def find_changes(
    keys: Iterable[str],
    read: Callable[[str], Any],
    source: str,
    target: str,
    momentum: float | None = None,
) -> dict[str, Change]:
    """Return the keys of the converted state of one optimizer, or of several that share keys.

    Args:
        keys: ``state.<parameter>.<name>``, and ``param_groups.<number>.<setting>`` or, flattened,
            ``param_groups.<parameter>.<setting>``.
        read: Returns the value of a key of a setting or step counter.
        source: Optimizer that wrote the state; of :data:`OPTIMIZERS`.
        target: Optimizer that will read it.
        momentum: ``mu``, for groups that do not have it.

    Raises:
        CheckpointError: A state, setting or algorithm is unknown or missing; all are named.
    """
    states: dict[str, dict[str, str]] = defaultdict(dict)
    settings: dict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for key in keys:
        if match := _STATE.match(key):
            states[match[1]][match[2]] = key
        elif match := _GROUP.match(key):
            settings[match[1]][match[2]] = key
        elif key not in ("state", "param_groups"):
            problems.append(f"{key}: expected a state or setting of an optimizer, got another key")
    changes: dict[str, Change] = {}
    members: set[str] = set()
    for name, of_group in settings.items():
        listed = read(of_group["params"]) if "params" in of_group else [name]
        params = [str(param) for param in listed]
        members.update(params)
        try:
            is_muon = _is_muon(name, of_group, read, source)
            group = _Group(name, of_group, params, is_muon)
            convert = _muon_changes if is_muon else _adamw_changes
            changes |= convert(group, states, read, source, target, momentum)
            # A run that passed names looks for them.
            if target == "fsdp2" and "params" in of_group and set(listed) == set(params):
                changes |= _new_settings(group, {"param_names": params})
        except CheckpointError as error:
            problems += error.args
    problems += [
        f"state.{param}: expected a parameter of a group, got one of none"
        for param in states.keys() - members
    ]
    if problems:
        raise CheckpointError(*problems, "Nothing was written.")
    return changes


def _is_muon(
    name: str, settings: Mapping[str, str], read: Callable[[str], Any], source: str
) -> bool:
    """Return whether a group is stepped by Muon, or else by AdamW."""
    if not OPTIMIZERS[source].is_sum:
        if "betas" in settings:
            return False
        # SGD has both.
        if "momentum" in settings and "dampening" not in settings:
            return True
        raise CheckpointError(
            f"param_groups.{name}: expected settings of Muon (momentum) or AdamW (betas), got "
            f"{sorted(settings)}. Only state of these two is converted."
        )
    algorithm = read(settings["algorithm"]) if "algorithm" in settings else "nothing"
    if algorithm not in ("muon", "adamw"):
        raise CheckpointError(
            f"param_groups.{name}: expected algorithm 'muon' or 'adamw' of {source}, got "
            f"{algorithm!r:.99}. Pass the optimizer that wrote it by --from."
        )
    return algorithm == "muon"


def _kept(group: _Group) -> dict[str, Change]:
    return {key: Change(key) for name, key in group.keys.items() if name in _KEPT_SETTINGS}


def _new_settings(group: _Group, values: Mapping[str, Any]) -> dict[str, Change]:
    """Return new settings, beside one that there is."""
    key = next(iter(group.keys.values()))
    return {
        f"param_groups.{group.name}.{name}": Change(key, value=value)
        for name, value in values.items()
    }


def _muon_changes(
    group: _Group,
    states: Mapping[str, Mapping[str, str]],
    read: Callable[[str], Any],
    source: str,
    target: str,
    momentum: float | None,
) -> dict[str, Change]:
    old, new = OPTIMIZERS[source], OPTIMIZERS[target]
    found = read(group.keys[old.mu]) if old.mu in group.keys else None
    where = f"param_groups.{group.name}.{old.mu}"
    mu = momentum if found is None else float(found)
    if mu is None:
        raise CheckpointError(f"{where}: expected a number, got nothing. Pass it by --momentum.")
    if momentum is not None and mu != momentum:
        raise CheckpointError(
            f"{where}: expected --momentum {momentum}, got {mu}. Leave out --momentum."
        )
    if not 0.0 <= mu < 1.0:
        raise CheckpointError(f"{where}: expected a number from 0 to below 1, got {mu}.")
    factor = 1.0
    if old.is_sum != new.is_sum:
        factor = 1.0 - mu if old.is_sum else 1.0 / (1.0 - mu)
    changes = _kept(group)
    problems = []
    for param in group.params:
        kinds = states.get(param, {})
        if kinds.keys() - old.ignored != {old.momentum}:
            problems.append(
                f"state.{param}: expected {old.momentum} of Muon by {source}, got "
                f"{', '.join(sorted(kinds)) or 'nothing'}. Every matrix needs momentum: save after "
                "a step in which all have gradients, with the optimizer that --from names."
            )
            continue
        key = kinds[old.momentum]
        changes[f"state.{param}.{new.momentum}"] = Change(key, factor)
    if problems:
        raise CheckpointError(*problems)
    if old.mu == new.mu and old.is_sum == new.is_sum:
        changes |= {key: Change(key) for key in group.keys.values()}
        return changes
    values: dict[str, Any] = {new.mu: mu}
    if new.is_sum:
        values |= {"algorithm": "muon", "step": 0}
    return changes | _new_settings(group, values)


def _adamw_changes(
    group: _Group,
    states: Mapping[str, Mapping[str, str]],
    read: Callable[[str], Any],
    source: str,
    target: str,
    _: float | None,
) -> dict[str, Change]:
    old, new = OPTIMIZERS[source], OPTIMIZERS[target]
    if old == new:
        keys = [
            *group.keys.values(),
            *(k for p in group.params for k in states.get(p, {}).values()),
        ]
        return {key: Change(key) for key in keys}
    changes = _kept(group)
    new_names = {torch_name: name for name, torch_name in new.adamw.items()}
    # Of xtuner's groups, and of dion's earlier states.
    step = int(read(group.keys["step"])) if "step" in group.keys else 0
    for param in group.params:
        kinds = states.get(param, {})
        if unknown := kinds.keys() - old.adamw.keys() - old.ignored:
            raise CheckpointError(
                f"state.{param}: expected {', '.join(old.adamw)} of AdamW by {source}, got "
                f"{', '.join(sorted(unknown))}. Only these are converted."
            )
        found = {old.adamw[kind]: key for kind, key in kinds.items() if kind in old.adamw}
        for torch_name, key in found.items():
            changes[f"state.{param}.{new_names[torch_name]}"] = Change(key)
        if "step" in found:
            step = max(step, int(read(found["step"])))
        elif found:
            counter = torch.tensor(float(step), dtype=torch.float32)
            key = next(iter(kinds.values()))
            changes[f"state.{param}.{new_names['step']}"] = Change(key, value=counter)
    return changes | _new_settings(group, _adamw_settings(group, read, old, new, step))


def _adamw_settings(
    group: _Group, read: Callable[[str], Any], old: _Names, new: _Names, step: int
) -> dict[str, Any]:
    """Return the settings that AdamW has under other names."""
    wanted = ("beta1", "beta2", "epsilon") if old.is_sum else ("betas", "eps")
    missing = [name for name in wanted if name not in group.keys]
    if missing:
        raise CheckpointError(
            f"param_groups.{group.name}: expected {', '.join(wanted)} of AdamW, got no "
            f"{', '.join(missing)}. Pass the optimizer that wrote it by --from."
        )
    found = [read(group.keys[name]) for name in wanted]
    betas, eps = (tuple(found[:2]), found[2]) if old.is_sum else (tuple(found[0]), found[1])
    if new.is_sum:
        moments = {"beta1": betas[0], "beta2": betas[1], "epsilon": eps}
        return {**moments, "algorithm": "adamw", "step": step}
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    others = {name: value for name, value in defaults.items() if name not in _KEPT_SETTINGS}
    return {**others, "betas": betas, "eps": eps}
