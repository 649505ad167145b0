# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Validation of optimizer states on load."""

import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.fsdp2.parameters import (
    as_split_sizes,
    planned_parameters,
    without_wrappers,
)
from megatron_muon.fsdp2.settings import PLANNED, key_problems
from megatron_muon.runtime.agreement import (
    first_line,
    gather_objects,
    raise_where_any_rank_fails,
)
from megatron_muon.runtime.tensors import are_same, sharding_of
from megatron_muon.step.second_moments import MOMENT2_BUFFER
from megatron_muon.step.stored_state import MAIN_PARAM

# Keys of a parameter's state in Muon, the second only if it is adaptive.
_MUON_KEYS = {"momentum_buffer", MOMENT2_BUFFER}
_KEYS = {"adamw": {"exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}}
_PRE_HOOKS = "_optimizer_load_state_dict_pre_hooks"
_POST_HOOKS = "_optimizer_load_state_dict_post_hooks"
ADVICE = (
    "Nothing was loaded. Choose algorithms and groups as the run that saved did, or load the "
    "weights alone, or set fresh_if_moved of the optimizer to True: parameters that have moved get "
    "fresh state, and their groups keep the values of this run."
)


def arranged(
    optimizer: Any,  # noqa: ANN401 - a Muon, which imports this, or a MuonAdamW
    algorithms: Sequence[str],
    state_dict: Mapping[str, Any],
    fresh: Mapping[torch.Tensor, Mapping[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """Arrange a state by the parameter groups of an optimizer; nothing is loaded here.

    Args:
        optimizer: The optimizer. If its ``fresh_if_moved`` is set, parameters that have moved get
            fresh state, with a warning.
        algorithms: Algorithms of its groups.
        state_dict: The state to load.
        fresh: The current state of Muon's parameters, for keys and shapes.

    Returns:
        The state, by names of parameters, and its problems, as sentences.
    """
    named = list(planned_parameters(optimizer.param_groups))
    saved_params = _saved_params(
        state_dict["param_groups"], [parameter.name for parameter in named]
    )
    problems: list[str] = []
    state: dict[str, Any] = {}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        values, num_problems, first = group, len(problems), len(state)
        for parameter in named[first : first + len(group["params"])]:
            key, values = saved_params.get(parameter.name, (None, {}))
            saved = state_dict["state"].get(key, {})
            current = {k: v for k, v in fresh.get(parameter.param, {}).items() if k in _MUON_KEYS}
            # From a flat state torch makes empty dictionaries of missing entries.
            state[parameter.name] = {k: v for k, v in saved.items() if v != {}}
            problem = _problem(parameter.param, algorithms[number], current, state[parameter.name])
            # Without a gradient a parameter of AdamW has no state. torch's checkpoints leave out
            # parameters that were frozen since.
            has_none = not saved and not parameter.param.requires_grad
            if problem and not has_none and (saved or key is None or current):
                problems.append(f"{parameter.name}: {problem}")
                state[parameter.name] = {
                    key: torch.zeros_like(value) for key, value in current.items()
                }
        if "lr" not in values:
            problems.append(f"group {number}: expected settings of one group, got several or none")
        problems += [
            f"group {number}: {problem}, or remove the key from the groups of the state"
            for problem in key_problems(values, algorithms[number], optimizer._settings)
        ]
        _warn_of_layouts(number, values, group)
        # Keys that a checkpoint of an earlier torch lacks come from this run, and so do names.
        if len(problems) > num_problems:
            values = {}
        values = {k: v for k, v in values.items() if k not in (*PLANNED, "param_names")}
        groups.append({**group, **values, "params": [*state][first:]})
    if optimizer.fresh_if_moved and problems:
        warnings.warn("fresh state, or values of this run:\n" + "\n".join(problems), stacklevel=4)
        problems = []
    return {**state_dict, "state": state, "param_groups": groups}, problems


def _warn_of_layouts(number: int, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Warn where a group has another layout in a state; that of construction stays.

    A checkpoint of torch.optim.Muon has none.
    """
    for key, default in PLANNED.items():
        values = saved.get(key, default), own.get(key, default)
        if as_split_sizes(values[0]) != as_split_sizes(values[1]):
            warnings.warn(
                f"group {number}: the checkpoint has {key} {values[0]}, this run {values[1]}, "
                "which it keeps.",
                stacklevel=5,
            )


def _saved_params(saved_groups: Sequence[Any], names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return keys and groups in a state by parameter name, or by position without names.

    torch's ``set_optimizer_state_dict`` has sorted parameters by name, and the names are the keys:
    ``param_names`` may belong to another group.
    """
    saved = {
        name: (key, group)
        for group in saved_groups
        for name, key in zip(group.get("param_names", ()), group["params"], strict=False)
        if isinstance(key, int)
    }
    own_names = [*map(without_wrappers, names)]
    counts, own_counts = Counter(map(without_wrappers, saved)), Counter(own_names)
    # torch.compile or activation checkpointing may have been switched on or off since.
    by_own_name = {
        own: value for name, value in saved.items() if counts[own := without_wrappers(name)] == 1
    }
    matched = {
        name: saved.get(name) or by_own_name.get(own if own_counts[own] == 1 else name)
        for name, own in zip(names, own_names, strict=True)
    }
    if any(matched.values()):
        return {name: value for name, value in matched.items() if value}
    params = [(key, group) for group in saved_groups for key in group["params"]]
    if len(params) != len(names):
        raise ValueError(f"param_groups: expected {len(names)} parameters, got {len(params)}")
    return dict(zip(names, params, strict=True))


def _problem(
    param: torch.Tensor, algorithm: str, current: Mapping[str, Any], saved: Mapping[str, Any]
) -> str | None:
    """Describe a mismatch of a state and its parameter, or return None."""
    keys = saved.keys() & set.union(_MUON_KEYS, *_KEYS.values())
    expected = _KEYS.get(algorithm, current.keys())
    if keys != expected:
        return f"expected {sorted(expected)} of {algorithm}, got {sorted(keys)}"
    shapes = [
        tuple(each[MOMENT2_BUFFER].shape) for each in (current, saved) if MOMENT2_BUFFER in each
    ]
    if len(set(shapes)) > 1:
        return f"expected {MOMENT2_BUFFER} of {shapes[0]}, got {shapes[1]}"
    sharding = sharding_of(saved.get("momentum_buffer", param))
    if sharding != sharding_of(param):
        return (
            f"expected momentum of {sharding_of(param)}, got {sharding}. Load through "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    return None


def follow_elementwise(
    known: list[weakref.ref[torch.Tensor]],
    algorithms: Iterable[str],
    groups: Iterable[Mapping[str, Any]],
    state: Mapping[torch.Tensor, Mapping[str, Any]],
) -> tuple[list[str], set[torch.Tensor]]:
    """Return problems of the state of AdamW and Lion, and parameters that get a fresh one.

    Args:
        known: Tensors of the last call, which are not compared again; updated.
        algorithms: Algorithms of the groups.
        groups: Parameter groups.
        state: State by parameter; users may have removed or replaced some.
    """
    held: list[Any] = []
    fresh: set[torch.Tensor] = set()
    for number, (algorithm, group) in enumerate(zip(algorithms, groups, strict=True)):
        if algorithm == "muon":
            continue
        keys = [*_KEYS[algorithm], *["max_exp_avg_sq"] * bool(group.get("amsgrad"))]
        for index, param in enumerate(group["params"]):
            if values := state.get(param):
                held += [(number, index, param, key, values.get(key)) for key in keys]
                if algorithm == "adamw":
                    held.append((number, index, None, "step", values.get("step")))
            elif param.grad is not None:
                fresh.add(param)
    if are_same(known, [value for *_, value in held]):
        return [], fresh
    problems = []
    for number, index, param, key, value in held:
        memory = ("dtype", "device") if param is not None else ()
        expected = sharding_of(torch.zeros(()) if param is None else param, *memory)
        if (actual := sharding_of(value, *memory)) != expected:
            problems.append(
                f"group {number}, parameter {index}: expected {key} of {expected}, got {actual}. "
                "Put a tensor like the parameter there, or remove all of its state"
            )
    known[:] = [] if problems else [weakref.ref(value) for *_, value in held]
    return problems, fresh


def after_pre_hooks(
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


def load_between_hooks(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load as torch does, without hooks: they are called before anything is compared, and last."""
    hooks = {kind: getattr(optimizer, kind) for kind in (_PRE_HOOKS, _POST_HOOKS)}
    vars(optimizer).update({kind: {} for kind in hooks})
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        vars(optimizer).update(hooks)


def call_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks of the end of a load."""
    for hook in getattr(optimizer, _POST_HOOKS).values():
        hook(optimizer)


def load_together(
    muon: Any,  # noqa: ANN401
    optimizer: Any,  # noqa: ANN401
    algorithms: Sequence[str],
    state_dict: Mapping[str, Any],
    problems: list[str],
) -> None:
    """Load a state on all ranks that step together, or raise on all of them.

    A state without entries on any rank is one of before the first step.

    Args:
        muon: Steps the matrices.
        optimizer: The optimizer around it, or the same.
        algorithms: Algorithms of its parameter groups.
        state_dict: Its state, with its errors, of ``after_pre_hooks()``.
        problems: These errors.

    Raises:
        RuntimeError: On all ranks, with the problems. State and groups are unchanged.

    Communication: a gather of objects, and a flag, over the ranks that step together.
    """
    has_state = bool(problems or state_dict.get("state", True))
    if muon._holders:
        has_state = any(gather_objects(has_state, muon.muon_step.group))
    before = optimizer.state, optimizer.param_groups
    # The state views these tensors, and a load copies into them.
    moments: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        moments += [(each.values, each.values.clone()) for each in muon.engine.moments]
        if not problems:
            # Without state that was removed no key would be expected.
            muon.muon_step.follow_state()
            fresh = muon.state if has_state else {}
            new_state, problems = arranged(optimizer, algorithms, state_dict, fresh)
        if not problems:
            load_between_hooks(optimizer, new_state)
            # Again: torch has loaded these tensors in the dtype of the parameter.
            for parameter in planned_parameters(optimizer.param_groups):
                loaded = optimizer.state[parameter.param]
                for key in loaded.keys() & {*_MUON_KEYS, MAIN_PARAM}:
                    loaded[key] = new_state["state"][parameter.name][key].to(loaded[key].device)
            muon.muon_step.complete_state(optimizer.state)
    # Any error: other ranks may have loaded theirs.
    except Exception as error:
        problems = [first_line(error)]
    try:
        # A rank without parameters has no group to agree with.
        if muon._holders:
            step = muon.muon_step
            raise_where_any_rank_fails(problems, step.group, step.device, ADVICE)
        elif problems:
            raise RuntimeError("\n".join([*problems, ADVICE]))
    except RuntimeError:
        optimizer.state, optimizer.param_groups = before
        for values, old in moments:
            values.copy_(old)
        raise
    muon.state, muon._is_changing = optimizer.state, False
    muon.muon_step.removed.clear()
    if not has_state and optimizer is not muon:
        optimizer.state = defaultdict(dict)
    optimizer._has_stepped = has_state
    call_post_hooks(optimizer)
