# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Validate an optimizer state that is loaded."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.fsdp2.parameters import named_parameters
from megatron_muon.runtime.agreement import first_line, raise_where_any_rank_fails
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.second_moments import KEY
from megatron_muon.step.stored_state import MAIN_PARAM

# Of a parameter group: they decide the plan, so those of construction stay. A group without them
# gets none: a checkpoint of torch.optim.Muon has no such keys.
PLANNED = {"split_sizes": None, "transposed": False, "flatten": False}
# In the state of a parameter; that of Muon has the second only if it is adaptive.
_MUON_KEYS = {"momentum_buffer", KEY}
_KEYS = {"adamw": {"exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}}
_ADVICE = (
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
    """Arrange a state as the groups of an optimizer are; nothing is loaded here.

    Args:
        optimizer: The optimizer. If its ``fresh_if_moved`` is set, parameters that have moved get
            fresh state, with a warning.
        algorithms: Of its groups.
        state_dict: What is to be loaded.
        fresh: The state of Muon's parameters, for the keys and shapes that it has.

    Returns:
        The state, by names of parameters, and what is wrong with it, as sentences.
    """
    named = list(named_parameters(optimizer.param_groups))
    places = _places(state_dict["param_groups"], [each.name for each in named])
    problems: list[str] = []
    state: dict[str, Any] = {}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        values, num_problems, first = group, len(problems), len(state)
        for each in named[first : first + len(group["params"])]:
            key, values = places.get(each.name, (None, {}))
            saved = state_dict["state"].get(key, {})
            own = {k: v for k, v in fresh.get(each.param, {}).items() if k in _MUON_KEYS}
            # From a flat state torch makes empty dictionaries of what is not there.
            state[each.name] = {k: v for k, v in saved.items() if v != {}}
            problem = _problem(each.param, algorithms[number], own, state[each.name])
            # Without a gradient a parameter of AdamW has no state.
            if problem and (saved or key is None or own):
                problems.append(f"{each.name}: {problem}")
                state[each.name] = {key: torch.zeros_like(value) for key, value in own.items()}
        if "lr" not in values:
            problems.append(f"group {number}: expected parameters of one group, got several")
        for key, default in PLANNED.items():
            loaded, kept = values.get(key, default), group.get(key, default)
            # A checkpoint may have made a list of a tuple.
            if (tuple(loaded) if isinstance(loaded, list) else loaded) != (
                tuple(kept) if isinstance(kept, list) else kept
            ):
                warnings.warn(
                    f"group {number}: the checkpoint has {key} {loaded}, this run {kept}, which it "
                    "keeps.",
                    stacklevel=4,
                )
        # What a checkpoint of an earlier torch lacks is that of this run, and so are names.
        taken = {k: v for k, v in values.items() if k not in (*PLANNED, "param_names")}
        if len(problems) > num_problems:
            taken = {}
        groups.append({**group, **taken, "params": [*state][first:]})
    if optimizer.fresh_if_moved and problems:
        warnings.warn("fresh state, or values of this run:\n" + "\n".join(problems), stacklevel=4)
        problems = []
    return {**state_dict, "state": state, "param_groups": groups}, problems


def _places(saved_groups: Sequence[Any], names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return key and group of each parameter in a state, by name, or by position without names.

    torch's ``set_optimizer_state_dict`` has put parameters in order by their names, which are the
    keys then: ``param_names`` may be those of another group.
    """
    saved = {
        name: (key, group)
        for group in saved_groups
        for name, key in zip(group.get("param_names", ()), group["params"], strict=False)
        if isinstance(key, int)
    }
    if saved.keys() & set(names):
        return saved
    places = [(key, group) for group in saved_groups for key in group["params"]]
    if len(places) != len(names):
        raise ValueError(f"param_groups: expected {len(names)} parameters, got {len(places)}")
    return dict(zip(names, places, strict=True))


def _problem(
    param: torch.Tensor, algorithm: str, own: Mapping[str, Any], saved: Mapping[str, Any]
) -> str | None:
    """Describe why a state is not that of a parameter, or return None."""
    keys = saved.keys() & set.union(_MUON_KEYS, *_KEYS.values())
    expected = _KEYS.get(algorithm, own.keys())
    if keys != expected:
        return f"expected {sorted(expected)} of {algorithm}, got {sorted(keys)}"
    sharding = _sharding(saved.get("momentum_buffer", param))
    if sharding != _sharding(param):
        return (
            f"expected momentum of {_sharding(param)}, got {sharding}. Load through "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    return None


def load_together(
    muon: Any,  # noqa: ANN401
    optimizer: Any,  # noqa: ANN401
    algorithms: Sequence[str],
    state_dict: Mapping[str, Any],
) -> None:
    """Load a state on all ranks that step together, or raise on all of them.

    Args:
        muon: Steps the matrices.
        optimizer: The one that it is a part of, or the same.
        algorithms: Of the groups of the optimizer.
        state_dict: Its state.

    Raises:
        RuntimeError: On all ranks, with what is wrong. State and groups are those of before.

    Communication: a flag over the ranks that step together.
    """
    before = optimizer.state, optimizer.param_groups
    try:
        given, problems = arranged(optimizer, algorithms, state_dict, muon.state)
        if not problems:
            torch.optim.Optimizer.load_state_dict(optimizer, given)
            # Again what torch has loaded in the dtype of the parameter.
            for each in named_parameters(optimizer.param_groups):
                own = optimizer.state[each.param]
                for key in own.keys() & {*_MUON_KEYS, MAIN_PARAM}:
                    own[key] = given["state"][each.name][key].to(own[key].device)
            muon.muon_step.complete_state(optimizer.state)
    # Whatever it is: other ranks may have loaded theirs.
    except Exception as error:
        problems = [first_line(error)]
    try:
        if muon._holders:
            step = muon.muon_step
            raise_where_any_rank_fails(problems, step.group, step.device, _ADVICE)
    except RuntimeError:
        optimizer.state, optimizer.param_groups = before
        raise
    muon.state, muon._is_changing = optimizer.state, False


def _sharding(tensor: torch.Tensor) -> str:
    """Describe how a tensor is sharded."""
    text = f"local shape {tuple(local_tensor(tensor).shape)}"
    return f"{text}, {tensor.placements}" if isinstance(tensor, DTensor) else text
