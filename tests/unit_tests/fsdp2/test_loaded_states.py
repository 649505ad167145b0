# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""States of other algorithms and groups: refused and nothing changed, or fresh state instead."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from helpers.device import kind
from helpers.fsdp2_models import draw_grads, drawn, small_model, step
from helpers.ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from megatron_muon.fsdp2 import Muon, MuonAdamW

# Muon's matrices are up and down; down moves to AdamW, or comes from there.
OTHERS = ("embed", "norm", "bias")
OPTIONS = {"weight_decay": 0.1, "scale_mode": "spectral", "fp32_matmul_prec": "high"}


def _muon_adamw(model: Any, *moved: str) -> MuonAdamW:
    return MuonAdamW.from_model(model, 0.1, elementwise_names=[*OTHERS, *moved], **OPTIONS)


def _muon(model: Any, **options: Any) -> Muon:
    return Muon([("up", model.up.weight), ("down", model.down.weight)], **options)


def _weights(model: Any) -> dict[str, Any]:
    whole = {name: param.detach() for name, param in model.named_parameters()}
    return {n: getattr(x, "full_tensor", lambda x=x: x)().clone() for n, x in whole.items()}


def _stepped_alone(weight: Any, grad: Any, *, is_muon: bool) -> Any:
    """Return a whole matrix after its first step, with optimizers of others."""
    param = torch.nn.Parameter(weight.clone())
    param.grad = grad
    if is_muon:
        WholeMatrixMuon([param], 0.1, 0.95, nesterov=True, **OPTIONS).step()
    else:
        torch.optim.AdamW([param], lr=0.1, weight_decay=0.1).step()
    return param.detach()


def _get(model: Any, optimizer: Any, form: str) -> Any:
    if form == "plain":
        return copy.deepcopy(optimizer.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))


def _set(model: Any, optimizer: Any, state: Any, form: str) -> None:
    if form == "plain":
        optimizer.load_state_dict(state)
        return
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _refused(build: Callable[[], tuple[Any, Any]], load: Callable) -> str:
    """Load between two steps, and return the error; a run that loads nothing has the same bits."""
    runs = [build() for _ in range(2)]
    for run in runs:
        step(*run, 2)
    with pytest.raises(RuntimeError) as error:
        load(*runs[0])
    for run in runs:
        step(*run, 3)
    one, other = (_weights(model) for model, _ in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    return str(error.value)


def _load_moved(form: str, to_muon: bool) -> None:
    """Load where a matrix has another algorithm: refused, or with fresh state for it alone."""

    def build(is_saving: bool = False) -> tuple[Any, MuonAdamW]:
        model = small_model(is_sharded=form != "plain")
        return model, _muon_adamw(model, *(["down"] if is_saving == to_muon else []))

    model, optimizer = build(is_saving=True)
    step(model, optimizer, 0)
    state, weights = _get(model, optimizer, form), copy.deepcopy(model.state_dict())
    step(model, optimizer, 1)
    expected = _weights(model)
    error = _refused(build, lambda *run: _set(*run, copy.deepcopy(state), form))
    said = "expected ['momentum_buffer'] of muon" if to_muon else "['exp_avg', 'exp_avg_sq'] of ad"
    assert "down.weight: " in error and said in error and "fresh_if_moved" in error
    assert "up.weight" not in error

    model, optimizer = build()
    model.load_state_dict(weights)
    optimizer.fresh_if_moved = True
    before = _weights(model)["down.weight"]
    with pytest.warns(UserWarning, match="fresh state") as warned:
        _set(model, optimizer, state, form)
    (text,) = (str(each.message) for each in warned if "fresh state" in str(each.message))
    assert "down.weight" in text and "up.weight" not in text
    step(model, optimizer, 1)
    grad = model.down.weight.grad
    grad = grad.full_tensor() if form != "plain" else grad
    expected["down.weight"] = _stepped_alone(before, grad, is_muon=to_muon)
    for name, value in _weights(model).items():
        # On shards this matrix is computed in another order.
        atol = 1e-6 if name == "down.weight" else 0.0
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=atol)


@pytest.mark.parametrize("to_muon", [True, False])
def test_state_of_another_algorithm_is_refused_or_left_out(to_muon):
    """State of a matrix that moved between Muon and AdamW is refused, or fresh where asked for."""
    # Positions say nothing in a plain state, where groups have other sizes: names do.
    _load_moved("plain", to_muon)


def _two(lr: float = 0.1) -> MuonAdamW:
    return MuonAdamW([(name, torch.nn.Parameter(torch.ones(4, 4))) for name in "ab"], lr)


@pytest.mark.parametrize("names", [True, False])
def test_state_of_adamw_is_refused_by_its_keys(names):
    """State of torch's AdamW is refused with advice that helps."""
    params = {name: torch.nn.Parameter(torch.randn(4, 4)) for name in "ab"}
    given = list(params.items()) if names else list(params.values())
    adamw = torch.optim.AdamW(given)
    draw_grads(params.values(), 0)
    adamw.step()
    for make in (Muon, MuonAdamW):
        with pytest.raises(RuntimeError, match=r"got \['exp_avg', 'exp_avg_sq'\]") as error:
            make([{"params": given, "algorithm": "muon"}]).load_state_dict(adamw.state_dict())
        assert "weights alone" in str(error.value) and "Load through" not in str(error.value)


def test_group_whose_parameters_were_in_several_is_refused():
    """Settings of a group are not lost where its parameters were in several groups."""
    loaded = _two(lr=0.5)
    # Torch leaves out its values: the next step ended with a KeyError of lr.
    nested = {
        "state": {name: {"momentum_buffer": torch.ones(4, 4)} for name in "ab"},
        "param_groups": [{"params": ["a", "b"]}],
    }
    with pytest.raises(RuntimeError, match="group 0: expected settings of one group"):
        loaded.load_state_dict(nested)
    loaded.fresh_if_moved = True
    with pytest.warns(UserWarning, match="group 0"):
        loaded.load_state_dict(nested)
    assert loaded.param_groups[0]["lr"] == 0.5
    assert all(each["momentum_buffer"].eq(1).all() for each in loaded.state.values())


def _load_other_groups(is_wrong: bool = True) -> None:
    """Load groups of another model without state, for which nothing is planned."""
    loaded = _two(lr=0.5)
    state = _two().state_dict()
    if is_wrong:
        state["param_groups"][0]["param_names"] = ["a", "c"]
    with pytest.raises(RuntimeError, match="group 0: expected settings of one group"):
        loaded.load_state_dict(state)
    assert loaded.param_groups[0]["lr"] == 0.5


def test_groups_without_state_are_not_taken_from_another_model():
    """Groups with other names are refused even in a state without tensors."""
    _load_other_groups()


def test_state_of_another_method_is_refused():
    """State without the second moments of a method is refused, unless fresh state is asked for."""
    plain, ours, namo = (
        Muon([torch.nn.Parameter(drawn((3, 4), 0))], adaptive=each)
        for each in (None, "normuon", "namo")
    )
    with pytest.raises(RuntimeError, match=r"expected \['moment2_of_owner'\] of the same method"):
        ours.load_state_dict(namo.state_dict())
    with pytest.raises(RuntimeError, match="expected .*moment2_of_owner.* of the same method"):
        ours.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="expected .* of muon, got .*step_of_all_ranks"):
        plain.load_state_dict(ours.state_dict())
    ours.fresh_if_moved = True
    with pytest.warns(UserWarning, match="fresh state"):
        ours.load_state_dict(plain.state_dict())
    (state,) = ours.state.values()
    assert state["moment2_of_owner"].shape == (1, 4)


def test_splits_of_this_run_win_over_those_of_the_checkpoint():
    """Splits of this run stay, with a warning, since they decide the plan."""
    param = torch.nn.Parameter(torch.ones(4, 4))
    saved = Muon([{"params": [param], "split_sizes": 2, "transposed": True}]).state_dict()
    other = Muon([{"params": [param], "split_sizes": (1, 3)}])
    with pytest.warns(UserWarning) as warned:
        other.load_state_dict(saved)
    (text,) = (str(each.message) for each in warned)
    assert "the checkpoint has {'split_sizes': 2, 'transposed': True, " in text
    assert "this run {'split_sizes': (1, 3), 'transposed': False, " in text
    assert other.param_groups[0]["split_sizes"] == (1, 3)
    assert "transposed" not in other.param_groups[0]


def _momentum(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state"][0].update(momentum_buffer=value)


# What is done to the state, and what rank 1 says.
FAULTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda state: state.pop("state"), ""),
    (lambda state: state.update(param_groups=None), ""),
    (lambda state: state["param_groups"][0]["param_names"].insert(0, "other"), ""),
    (lambda state: state["param_groups"][0].update(ns_steps=3), "ns_steps: expected no such key"),
    (_momentum("x"), ""),
    (_momentum(torch.ones(99)), "local shape"),
    # Zeros in its place would be another run.
    (lambda state: state.update(state={}), "expected ['momentum_buffer'] of muon, got []"),
]


def _load_faulty() -> None:
    """Spoil the state on rank 1 and load it."""

    def build(make: Callable) -> tuple[Any, Any]:
        model = small_model(is_sharded=True)
        return model, make(model)

    def load(spoil: Callable, _: Any, optimizer: Any) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        for each in state["state"].values():
            each.update({k: v + 1 for k, v in each.items()})
        if torch.distributed.get_rank() == 1:
            spoil(state)
        optimizer.load_state_dict(state)

    normuon = partial(_muon, adaptive="normuon")
    for make, (spoil, said) in itertools.product((_muon_adamw, _muon, normuon), FAULTS):
        error = _refused(partial(build, make), partial(load, spoil))
        assert error.startswith("Stopping on all ranks:") and "rank 1: " in error
        # NorMuon expects second moments beside momentum.
        assert said in error or make is normuon


def _load_with_an_idle_rank() -> None:
    """Load the first state where rank 1, as some pipeline stages, has no parameters.

    It had no state to load, planned nothing, and the others waited.
    """
    is_idle = torch.distributed.get_rank() == 1
    meshes = [DeviceMesh(kind(), [rank]) for rank in range(2)]
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), meshes[0], [Replicate()]))
    optimizer = MuonAdamW([] if is_idle else [("w", param)])
    momentum = distribute_tensor(torch.ones(4, 4), meshes[0], [Replicate()])
    state = optimizer.state_dict()
    state["state"] = {} if is_idle else {0: {"momentum_buffer": momentum}}
    optimizer.load_state_dict(state)
    sums = [each["momentum_buffer"].to_local().sum().item() for each in optimizer.state.values()]
    assert sums == ([] if is_idle else [16.0])


def _load_with_frozen_matrices() -> None:
    """Freeze a layer after a step: it keeps its weights, and torch's checkpoints leave it out."""
    model = small_model(is_sharded=True)
    optimizer = _muon_adamw(model)
    step(model, optimizer, 0)
    model.zero_grad()
    model.up.requires_grad_(False)
    before = _weights(model)["up.weight"]
    state = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, state)
    step(model.down, optimizer, 1)
    assert torch.equal(before, _weights(model)["up.weight"])


@on_ranks(2)
def test_loads_on_two_ranks():
    """A load that is wrong on one rank changes nothing on any; idle ranks take part."""
    _load_with_frozen_matrices()
    for form, to_muon in itertools.product(("nested", "flat"), (True, False)):
        _load_moved(form, to_muon)
    _load_faulty()
    _load_other_groups(is_wrong=torch.distributed.get_rank() == 1)
    _load_with_an_idle_rank()
