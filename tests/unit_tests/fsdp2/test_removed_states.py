# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""State that users remove or replace between steps, beside torch's AdamW and whole matrices."""

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from helpers.fsdp2_models import (
    copies,
    draw_grads,
    equal,
    load_state,
    local,
    save_state,
    small_model,
    step,
)
from helpers.ranks import on_ranks

from megatron_muon.fsdp2 import Muon, MuonAdamW

OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "nesterov": True}
OPTIONS |= {"scale_mode": "spectral", "fp32_matmul_prec": "high"}


def _replace(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


# What users do to a state.
RESETS: dict[str, Callable[[Any], Any]] = {
    "replace": _replace,
    "clear": lambda optimizer: optimizer.state.clear(),
    "delete": lambda optimizer: [optimizer.state.pop(param) for param in [*optimizer.state]],
    "empty": lambda optimizer: optimizer.state.update({param: {} for param in optimizer.state}),
    "pop": lambda optimizer: [values.clear() for values in optimizer.state.values()],
    "pop of matrices": lambda optimizer: [
        optimizer.state[param].pop("momentum_buffer") for param in _group(optimizer, 0)
    ],
}


def _group(optimizer: Any, number: int) -> list[Any]:
    return optimizer.param_groups[number]["params"]


def _stepped(is_sharded: bool = False, dtype: Any = torch.float32) -> tuple[Any, MuonAdamW]:
    model = small_model(dtype, is_sharded=is_sharded)
    optimizer = MuonAdamW.from_model(model, **OPTIONS)
    step(model, optimizer, 0)
    return model, optimizer


def _reset_in_the_third_step(reset: Callable, *runs: tuple[Any, list[Any]]) -> None:
    """Step parameters with optimizers, and compare the parameters of the runs."""
    for number in range(4):
        for params, optimizers in runs:
            draw_grads(params, number)
            for each in optimizers:
                if number == 2:
                    reset(each)
                each.step()
    for own, expected in zip(*(params for params, _ in runs), strict=True):
        # Newton-Schulz of a stack is computed in another order.
        torch.testing.assert_close(own, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("reset", [*RESETS][:5])
def test_removed_state_is_fresh(reset):
    """State that is removed in any way starts anew, as in the optimizers of others."""
    ours, theirs = small_model(), small_model()
    matrices = [theirs.up.weight, theirs.down.weight]
    others = [p for p in theirs.parameters() if all(p is not matrix for matrix in matrices)]
    references = [
        WholeMatrixMuon(matrices, **OPTIONS),
        torch.optim.AdamW(others, lr=0.1, weight_decay=0.1),
    ]
    optimizer = MuonAdamW.from_model(ours, **OPTIONS)
    _reset_in_the_third_step(
        RESETS[reset], ([*ours.parameters()], [optimizer]), ([*theirs.parameters()], references)
    )


@pytest.mark.parametrize("method", ["normuon", "namo", "adamuon"])
def test_removed_second_moments_are_zero(method):
    """Second moments start at zero after their state is removed."""
    ours, theirs = (
        [torch.nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (4, 9))] for _ in range(2)
    )
    settings = {**OPTIONS, "weight_decay_method": "decoupled", "beta2": 0.9, "eps": 1e-8}
    muon = Muon(ours, adaptive=method, **settings)
    settings |= {"momentum": 0.95, "coefficient_type": "quintic", "num_ns_steps": 5}
    reference = AdaptiveMuon(theirs, moment2_method=method, extra_scale_factor=1.0, **settings)
    _reset_in_the_third_step(RESETS["clear"], (ours, [muon]), (theirs, [reference]))


of_each = pytest.mark.parametrize(
    "make", [MuonAdamW.from_model, lambda m, **o: Muon([m.up.weight], **o)]
)


@pytest.mark.parametrize("reset", ["replace", "clear", "delete", "pop of matrices"])
@of_each
def test_state_is_loaded_after_it_was_removed(make, reset):
    """A state is loaded after the current one was removed, instead of refused."""
    model = small_model()
    optimizer = make(model, **OPTIONS)
    step(model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    RESETS[reset](optimizer)
    optimizer.load_state_dict(state)
    loaded = optimizer.state_dict()["state"]
    assert loaded.keys() == state["state"].keys()
    for number, values in loaded.items():
        assert all(torch.equal(values[key], value) for key, value in state["state"][number].items())


@of_each
def test_state_of_the_start_is_loaded_later(make):
    """A state from before the first step loads later, as a search for a learning rate does."""
    ends = []
    for is_searching in (False, True):
        model = small_model()
        optimizer = make(model, **OPTIONS)
        start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if is_searching:
            step(model, optimizer, 7)
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
        for seed in range(2):
            step(model, optimizer, seed)
        ends.append(copies(model, optimizer))
    assert equal(*ends)


def test_hooks_of_a_load_come_before_all_comparisons_and_after_all_changes():
    """Hooks of a load may convert states of others before they are compared."""
    _, optimizer = _stepped()
    state, calls = copy.deepcopy(optimizer.state_dict()), []
    foreign = copy.deepcopy(state)
    for values in foreign["state"].values():
        if "momentum_buffer" in values:
            values["momentum"] = values.pop("momentum_buffer")

    def convert(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        calls.append("before")
        assert loaded["param_groups"][0]["params"] == [0, 1]
        return state

    def look(loaded: Any) -> None:
        calls.append("after")
        assert loaded is optimizer and loaded.state[loaded.param_groups[0]["params"][0]]

    optimizer.register_load_state_dict_pre_hook(convert)
    optimizer.register_load_state_dict_post_hook(look)
    optimizer.load_state_dict(foreign)
    assert calls == ["before", "after"]


WRAPPED = [
    "layers.0.{}",
    "layers.0._orig_mod.{}",
    "module.layers.0.{}",
    "layers.0._checkpoint_wrapped_module.{}",
]


@pytest.mark.parametrize("form", WRAPPED)
@pytest.mark.parametrize("is_saved", [True, False])
def test_names_match_but_for_prefixes_of_wrappers(form, is_saved):
    """A plain state is loaded by names, in any order, with and without prefixes of wrappers."""
    forms = (form, "layers.0.{}") if is_saved else ("layers.0.{}", form)
    runs = []
    # In another order: positions do not decide.
    for name, keys in zip(forms, ("ab", "ba"), strict=True):
        params = {key: torch.nn.Parameter(torch.ones(4, 3)) for key in keys}
        named = [(name.format(key), param) for key, param in params.items()]
        runs.append((params, Muon(named, 0.1 * len(runs))))
    (params, saved), (_, loaded) = runs
    draw_grads(params.values(), 0)
    saved.step()
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    first, second = ([run.state[of[key]]["momentum_buffer"] for key in "ab"] for of, run in runs)
    assert all(map(torch.equal, first, second)) and not torch.equal(*first)
    (group,) = loaded.param_groups
    assert (group["lr"], group["param_names"]) == (0.0, [forms[1].format(key) for key in "ba"])


def _put(value: Callable[[Any], Any], key: str = "momentum_buffer") -> Callable[[Any], None]:
    """Replace a tensor of the first parameter that has it."""

    def change(optimizer: Any) -> None:
        values = next(values for values in optimizer.state.values() if key in values)
        values[key] = value(values[key])

    return change


def test_copies_of_bfloat16_parameters_stay_in_float32():
    """A copy of a bfloat16 parameter that somebody rounds to bfloat16 is refused."""
    _, optimizer = _stepped(dtype=torch.bfloat16)
    _put(lambda value: value.bfloat16(), "main_param")(optimizer)
    with pytest.raises(RuntimeError, match="expected main_param of .*torch.float32"):
        optimizer.step()


# What one rank does, and what all say. Nothing changes.
FAULTS: list[tuple[Callable[[Any], Any], str]] = [
    (_replace, "rank 0: down.weight: expected to reset state on all ranks that hold"),
    (_put(lambda value: None), "rank 1: up.weight: expected momentum_buffer of local shape (3, 4)"),
    (_put(lambda value: value.to_local()), "rank 1: up.weight: expected momentum_buffer of"),
    (_put(lambda value: torch.ones(7)), "got local shape (7,)"),
    (
        lambda optimizer: [optimizer.state.pop(param) for param in _group(optimizer, 1)],
        "rank 0: embed.weight: expected to reset state on all ranks that hold",
    ),
    (_put(lambda value: torch.ones(7), "exp_avg"), "rank 1: embed.weight: expected exp_avg of"),
    (_put(lambda value: None, "step"), "rank 1: embed.weight: expected step, a"),
    (_put(lambda value: value.double(), "exp_avg_sq"), "torch.float32, cpu, got"),
    (
        lambda optimizer: optimizer.param_groups[1].update(lr=None),
        "rank 1: group 1: lr: expected a number",
    ),
]


def _change_one_rank() -> None:
    """Change state on rank 1 alone, and then load."""
    for change, said in FAULTS:
        model, optimizer = _stepped(is_sharded=True)
        state = copy.deepcopy(optimizer.state_dict())
        if dist.get_rank() == 1:
            change(optimizer)
        before = [local(param).detach().clone() for param in model.parameters()]
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                optimizer.step()
            assert said in str(error.value)
        assert all(map(torch.equal, before, map(local, model.parameters())))
        optimizer.load_state_dict(state)
        optimizer.step()
    # As of a file that only one rank has read.
    with pytest.raises(RuntimeError, match="rank 0: TypeError: 'NoneType'"):
        optimizer.load_state_dict(state if dist.get_rank() else None)


def _save_after_a_reset(folder: Path) -> None:
    """Save at once after state was removed, load, and go on as a run that did not stop."""
    for reset in ("replace", "delete", "pop of matrices"):
        model, optimizer = _stepped(is_sharded=True)
        model.zero_grad()
        RESETS[reset](optimizer)
        save_state(f"{folder}/{reset}", model, optimizer)
        other = small_model(is_sharded=True)
        loaded = MuonAdamW.from_model(other, **OPTIONS)
        load_state(f"{folder}/{reset}", other, loaded)
        step(model, optimizer, 1)
        step(other, loaded, 1)
        assert equal(copies(other, loaded), copies(model, optimizer))


@on_ranks(2)
def test_ranks_change_state_together(tmp_path):
    """A change of state on one rank is refused on all, and a save after a reset has all state."""
    _change_one_rank()
    _save_after_a_reset(tmp_path)
