# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Validation of optimizer states on load."""

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_muon.fsdp2.parameters import (
    Group,
    State,
    planned_parameters,
    without_wrappers,
)
from megatron_muon.fsdp2.settings import PLANNED, key_problems, layout_of
from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.tensors import are_same, sharding_of
from megatron_muon.step.hooks import MOMENT2_BUFFER
from megatron_muon.step.owner_state import STEP_OF_ALL, STEP_OF_OWNER
from megatron_muon.step.stored_state import MAIN_PARAM

_THROUGH_DCP = "Load through torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
type Followed = Sequence[weakref.ref[torch.Tensor]]

# Keys of a parameter's state in Muon, the second of AdaMuon, the third where owners have more.
_MUON_KEYS = {"momentum_buffer", MOMENT2_BUFFER, STEP_OF_ALL}
_OF_MUON = _MUON_KEYS | {MAIN_PARAM}
_KEYS = {"adamw": {"exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}}
_PRE_HOOKS = "_optimizer_load_state_dict_pre_hooks"
_POST_HOOKS = "_optimizer_load_state_dict_post_hooks"
ADVICE = (
    "Nothing was loaded. Choose algorithms and groups as the run that saved did, or load the "
    "weights alone, or set fresh_if_moved of the optimizer to True: parameters that have moved get "
    "fresh state, and their groups keep the values of this run."
)


def arrange_state(
    own_groups: Sequence[Group],
    algorithms: Sequence[str],
    settings: Group,
    state_dict: Mapping[str, Any],
    fresh: State,
    fresh_if_moved: bool,
) -> tuple[dict[torch.Tensor, dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return state and groups that are loaded into an optimizer, and errors, as sentences.

    Args:
        own_groups: The groups of the optimizer.
        algorithms: Their algorithms.
        settings: Settings that all groups of Muon share, by name.
        state_dict: The state to load.
        fresh: The current state of Muon's parameters, for keys and shapes.
        fresh_if_moved: Whether parameters that have moved get fresh state, with a warning.
    """
    names = {p.param: p.name for p in planned_parameters(own_groups)}
    saved_params = _saved_params(state_dict["param_groups"], [*names.values()])
    problems: list[str] = []
    state: dict[torch.Tensor, dict[str, Any]] = {}
    groups = []
    for number, (group, algorithm) in enumerate(zip(own_groups, algorithms, strict=True)):
        values, num_problems = group, len(problems)
        for param in group["params"]:
            key, values = saved_params.get(names[param], (None, {}))
            saved = state_dict["state"].get(key, {})
            is_owned = STEP_OF_ALL in fresh.get(param, {})
            current = {
                key: value
                for key, value in fresh.get(param, {}).items()
                if key in _MUON_KEYS or (is_owned and key != MAIN_PARAM)
            }
            # From a flat state torch makes empty dictionaries of missing entries.
            loaded = {
                key: _placed(key, value, param, values, keeps_dtype=is_owned)
                for key, value in saved.items()
                if not isinstance(value, dict)
            }
            if is_owned:
                # Of the state of all owners this rank takes its own.
                loaded = {k: v for k, v in loaded.items() if k in current or k == MAIN_PARAM}
                problem = _owned_problem(current, loaded)
            else:
                problem = _problem(param, algorithm, current, loaded, _THROUGH_DCP)
            # Without a gradient a parameter of AdamW has no state. torch's checkpoints leave out
            # parameters that were frozen since.
            has_none = not saved and not param.requires_grad
            if problem and not has_none and (saved or key is None or current):
                problems.append(f"{names[param]}: {problem}")
                # All ranks count from one number, also if one owner lacks its state.
                loaded = {k: v for k, v in loaded.items() if k == STEP_OF_ALL}
            # state_dict() looks for all parameters in it, which accelerate replaces after a load.
            if loaded:
                state[param] = loaded
        if "lr" not in values:
            problems.append(f"group {number}: expected settings of one group, got several or none")
        problems += [
            f"group {number}: {problem}, or remove the key from the groups of the state"
            for problem in key_problems(values, algorithm, settings)
        ]
        if layout_of(values) != layout_of(group):
            warnings.warn(
                f"group {number}: the checkpoint has {layout_of(values)}, this run "
                f"{layout_of(group)}, which it keeps.",
                stacklevel=4,
            )
        # Keys that a checkpoint of an earlier torch lacks come from this run, and so do names.
        kept = {"params", "param_names", *(values if len(problems) > num_problems else PLANNED)}
        new = {key: copy.deepcopy(value) for key, value in values.items() if key not in kept}
        groups.append({**group, **new})
    if fresh_if_moved and problems:
        warnings.warn("fresh state, or values of this run:\n" + "\n".join(problems), stacklevel=4)
        problems = []
    return state, groups, problems


def _owned_problem(current: Group, saved: Group) -> str | None:
    """Describe a mismatch of the state of owned matrices, or return None."""
    if missing := sorted(current.keys() - saved.keys()):
        return (
            f"expected {missing} of the same method or class, got {sorted(saved)}. {_THROUGH_DCP}"
        )
    for key, like in current.items():
        if key.endswith(STEP_OF_OWNER) and saved[key] != saved[STEP_OF_ALL]:
            return (
                f"expected {key} of the step that saved, got another, as with full_state_dict, "
                "which keeps what one rank owns. Save and load the state without it"
            )
        own, other = sharding_of(like), sharding_of(saved[key])
        if isinstance(like, torch.Tensor) and own != other:
            return f"expected {key} of {own}, got {other}. {_THROUGH_DCP}"
    return None


def _placed(key: str, value: Any, param: torch.Tensor, group: Group, *, keeps_dtype: bool) -> Any:  # noqa: ANN401
    """Return a value of a state where its optimizer has it, as torch's load does.

    Momentum and copies of Muon keep their dtypes.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step" and not keeps_dtype:
        is_read_there = group.get("fused") or group.get("capturable")
        return value.to(param.device, torch.float32) if is_read_there else value
    keeps_dtype |= key in _OF_MUON
    return value.to(param.device, value.dtype if keeps_dtype else param.dtype)


def _saved_params(saved_groups: Sequence[Any], names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return keys and groups in a state by parameter name, or by position without names.

    torch's ``set_optimizer_state_dict`` has sorted parameters by name, and the names are the keys:
    ``param_names`` may belong to another group.
    """
    saved = [(key, group) for group in saved_groups for key in group["params"]]
    saved_names = [name for group in saved_groups for name in group.get("param_names", ())]
    if saved_names and all(isinstance(key, int) for key, _ in saved):
        by_name = dict(zip(_without_wrappers(saved_names), saved, strict=True))
        own_names = zip(names, _without_wrappers(names), strict=True)
        if matched := {name: by_name[own] for name, own in own_names if own in by_name}:
            return matched
    if len(saved) != len(names):
        raise ValueError(f"param_groups: expected {len(names)} parameters, got {len(saved)}")
    return dict(zip(names, saved, strict=True))


def _without_wrappers(names: Sequence[str]) -> list[str]:
    """Return names that torch.compile or activation checkpointing do not change, if unique."""
    short = [*map(without_wrappers, names)]
    counts = Counter(short)
    return [own if counts[own] == 1 else name for name, own in zip(names, short, strict=True)]


def _problem(
    param: torch.Tensor, algorithm: str, current: Group, saved: Group, advice: str, *attributes: str
) -> str | None:
    """Describe a mismatch of a state and its parameter, or return None."""
    keys = saved.keys() & _MUON_KEYS.union(*_KEYS.values())
    expected = _KEYS.get(algorithm, current.keys())
    if keys != expected:
        return f"expected {sorted(expected)} of {algorithm}, got {sorted(keys)}"
    for key in sorted(keys):
        own, other = (sharding_of(tensor, *attributes) for tensor in (param, saved[key]))
        if own != other:
            return f"expected {key} of {own}, got {other}. {advice}"
    if algorithm == "adamw" and sharding_of(saved.get("step")) != "local shape ()":
        return f"expected step, a tensor of one number, got {saved.get('step')}. {advice}"
    return None


def check_elementwise_state(
    groups: Sequence[Group], algorithms: Sequence[str], state: State, followed: Followed
) -> tuple[list[str], set[torch.Tensor], Followed]:
    """Check the state of AdamW and Lion, which users remove or replace, where it is another one.

    Args:
        groups: Parameter groups.
        algorithms: Their algorithms.
        state: State by parameter.
        followed: Its tensors when it was checked.

    Returns:
        Problems, parameters that get fresh state, and the tensors that are checked now.
    """
    own = [pair for pair in zip(groups, algorithms, strict=True) if pair[1] != "muon"]
    params = [param for group, _ in own for param in group["params"]]
    fresh = {param for param in params if param.grad is not None and not state.get(param)}
    stored = [value for param in params for value in state.get(param, {}).values()]
    tensors = [value for value in stored if isinstance(value, torch.Tensor)]
    if are_same(followed, tensors):
        return [], fresh, followed
    names = {p.param: p.name for p in planned_parameters(groups)}
    advice = "Put a tensor like the parameter there, or remove all of its state"
    problems = [
        f"{names[param]}: {problem}"
        for group, algorithm in own
        for param in group["params"]
        if (values := state.get(param))
        and (problem := _problem(param, algorithm, {}, values, advice, "dtype", "device"))
    ]
    return problems, fresh, [] if problems else [*map(weakref.ref, tensors)]


def call_pre_hooks(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Return a state as the hooks of its load leave it, and their errors."""
    try:
        state_dict = dict(state_dict)
        for hook in getattr(optimizer, _PRE_HOOKS).values():
            changed = hook(optimizer, state_dict)
            state_dict = state_dict if changed is None else dict(changed)
    # Any error: other ranks go on to collectives.
    except Exception as error:
        return {}, [first_line(error)]
    return state_dict, []


def call_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks of the end of a load."""
    for hook in getattr(optimizer, _POST_HOOKS).values():
        hook(optimizer)
