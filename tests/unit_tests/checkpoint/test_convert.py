# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other optimizers: a run that goes on from a converted one is the one before.

Momentum as a sum and as an average differ by a factor that Newton-Schulz drops, so that losses
differ by float32's rounding over three steps: 1.2e-7 has been seen, and 9e-3 without the factor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.device import init_group
from helpers.ranks import run_ranks
from helpers.sum_muon import PACKAGES, PRECISE, SumMuon, package_muon
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_muon.checkpoint.__main__ import main
from megatron_muon.checkpoint.storage import read_checkpoint
from megatron_muon.checkpoint.verify import find_problems
from megatron_muon.fsdp2 import Muon

TOLERANCE = 2e-6
MU = 0.9
# xtuner's drops momentum that is loaded before its first step.
KINDS = [("dion", "fsdp2"), ("xtuner", "fsdp2"), ("fsdp2", "dion")]


def _build(kind: str, form: str = "nested", *, use_packages: bool = False) -> tuple[Any, list[Any]]:
    """Return a model, and its optimizers: one for all in dion's and xtuner's style, else two.

    A flattened state has no list of the parameters of a group, so that names cannot be loaded.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Tanh(), torch.nn.Linear(10, 4)
    )
    if use_packages:  # xtuner's takes DTensors alone
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    if kind in ("dion", "xtuner"):
        groups = [
            {"params": [param for _, param in matrices]},
            {"params": rest, "algorithm": "adamw"},
        ]
        return model, [package_muon(groups, kind) if use_packages else SumMuon(groups, kind)]
    adamw = torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    if kind == "torch":
        without_names = [param for _, param in matrices]
        return model, [torch.optim.Muon(without_names, lr=0.02, momentum=MU), adamw]
    params = matrices if form == "nested" else [param for _, param in matrices]
    return model, [Muon(params, lr=0.02, momentum=MU, weight_decay=0.1, **PRECISE), adamw]


def _train(model: Any, optimizers: list[Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(2, 32, 6, generator=generator)
        model.zero_grad()
        loss = (model(inputs) - targets[:, :4]).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def _state(model: Any, optimizers: list[Any], form: str) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    of_model, of_optimizers = get_state_dict(model, optimizers, options=options)
    return {"net": of_model, "train": {"optimizer": of_optimizers}, "epoch": 7}


def _save(model: Any, optimizers: list[Any], form: str, path: Path) -> None:
    state = _state(model, optimizers, form)
    if form == "file":
        torch.save(state, path)
    else:
        dcp.save(state, checkpoint_id=path, no_dist=True)


def _load(model: Any, optimizers: list[Any], form: str, path: Path, *, is_partial: bool) -> None:
    state = _state(model, optimizers, form)
    if form == "file":
        found = torch.load(path)
        if is_partial:
            for own, group in zip(
                state["train"]["optimizer"]["param_groups"],
                found["train"]["optimizer"]["param_groups"],
                strict=True,
            ):
                group |= {**own, **group}
        state = found
    else:
        # What the other optimizer does not know stays as the run has it.
        planner = DefaultLoadPlanner(allow_partial_load=is_partial)
        dcp.load(state, checkpoint_id=path, no_dist=True, planner=planner)
    assert state["epoch"] == 7
    set_state_dict(
        model,
        optimizers,
        model_state_dict=state["net"],
        optim_state_dict=state["train"]["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=form == "flat"),
    )


def _convert(source: Path, target: Path, kind: str, to: str, *more: str) -> int:
    return main(["convert", str(source), str(target), "--from", kind, "--to", to, *more])


def _momentum(optimizer: Any) -> list[torch.Tensor]:
    names = ("momentum_buffer", "momentum")
    return [state[name] for state in optimizer.state.values() for name in names if name in state]


@pytest.mark.parametrize("form", ["nested", "flat", "file"])
@pytest.mark.parametrize(("kind", "to"), KINDS)
def test_a_run_goes_on_with_another_optimizer(kind, to, form, tmp_path):
    """Three steps, a conversion, three steps: the losses of six steps by the first optimizer."""
    assert _go_on(kind, to, form, tmp_path) <= TOLERANCE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "saved"]


def _go_on(kind: str, to: str, form: str, folder: Path, *, use_packages: bool = False) -> float:
    """Return by how much losses differ, relatively, from those of the run that did not stop."""
    model, optimizers = _build(kind, form, use_packages=use_packages)
    _train(model, optimizers, range(3))
    _save(model, optimizers, form, folder / "saved")
    expected = _train(model, optimizers, range(3, 6))
    assert _convert(folder / "saved", folder / "converted", kind, to) == 0
    if form != "file":
        assert list(find_problems(read_checkpoint(folder / "converted"))) == []
    model, optimizers = _build(to, form, use_packages=use_packages)
    settings = [_settings(each) for each in optimizers]
    _load(model, optimizers, form, folder / "converted", is_partial=to != "fsdp2")
    if to == "fsdp2":
        # Those of AdamW that have another name, or none, in the other optimizer are new.
        assert [_settings(each) for each in optimizers] == settings
    found = _train(model, optimizers, range(3, 6))
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    # dion rounds lr to float32.
    others = ("params", "param_names", "lr")
    return [
        {name: value for name, value in group.items() if name not in others}
        for group in optimizer.param_groups
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["nested", "flat", "file"])
@pytest.mark.parametrize(("kind", "to"), KINDS)
def test_a_run_goes_on_with_the_package_itself(kind, to, form, tmp_path):
    """By hand, with the packages in PYTHONPATH: see :func:`helpers.sum_muon.package_muon`.

    Both round updates to bfloat16, so losses differ by more: 8.7e-5 has been seen (-rP prints it).
    """
    package = ({kind, to} - {"fsdp2"}).pop()
    pytest.importorskip(PACKAGES[package], reason=f"needs {package} in PYTHONPATH")
    # Without torch.compile of dion's arithmetic, which takes minutes.
    env = {"TORCHDYNAMO_DISABLE": "1"}
    run = run_ranks(1, _go_on_with_package, kind, to, form, str(tmp_path), env=env).check()
    (difference,) = run.results
    print(f"largest relative difference: {difference:.1e}")
    assert difference <= 5e-4


def _go_on_with_package(kind: str, to: str, form: str, folder: str) -> float:
    init_group()
    return _go_on(kind, to, form, Path(folder), use_packages=True)


@pytest.mark.parametrize("kind", ["dion", "fsdp2"])
def test_losses_differ_by_more_if_momentum_is_not_scaled(kind, tmp_path):
    """The tolerance tells a sum from an average."""
    model, optimizers = _build(kind)
    _train(model, optimizers, range(3))
    state = _momentum(optimizers[0])[:2]
    expected_model, expected_optimizers = _build(kind)
    _train(expected_model, expected_optimizers, range(3))
    expected = _train(expected_model, expected_optimizers, range(3, 6))
    for each in state:
        each.mul_(1 - MU if kind == "fsdp2" else 1 / (1 - MU))
    found = _train(model, optimizers, range(3, 6))
    assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) > 10 * TOLERANCE


@pytest.mark.parametrize("form", ["nested", "flat", "file"])
@pytest.mark.parametrize(("kind", "to"), [("torch", "fsdp2"), ("fsdp2", "torch")])
def test_torch_has_the_same_average(kind, to, form, tmp_path):
    """Weights and all states keep their bits; its Newton-Schulz rounds otherwise."""
    model, optimizers = _build(kind, form)
    _train(model, optimizers, range(3))
    _save(model, optimizers, form, tmp_path / "saved")
    assert _convert(tmp_path / "saved", tmp_path / "converted", kind, to) == 0
    loaded, others = _build(to, form)
    _load(loaded, others, form, tmp_path / "converted", is_partial=to == "torch")
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    assert all(map(torch.equal, _momentum(optimizers[0]), _momentum(others[0])))
    first, second = (list(each[1].state.values()) for each in (optimizers, others))
    assert len(first) == 4
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    # One step: momentum then is the average of the same gradients.
    _train(model, optimizers, range(3, 4))
    _train(loaded, others, range(3, 4))
    assert all(map(torch.equal, _momentum(optimizers[0]), _momentum(others[0])))


def test_numbers_in_place_of_names_are_kept(tmp_path):
    """``optimizer.state_dict()``, which loads by ``load_state_dict`` as it is."""
    model, optimizers = _build("xtuner")
    _train(model, optimizers, range(3))
    torch.save([optimizers[0].state_dict()], tmp_path / "saved.pt")
    assert _convert(tmp_path / "saved.pt", tmp_path / "new.pt", "xtuner", "fsdp2") == 0
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = _train(model, optimizers, range(3, 6))
    (found,) = torch.load(tmp_path / "new.pt")
    model, (muon, adamw) = _build("fsdp2", "numbers")
    model.load_state_dict(weights)
    for number, optimizer in enumerate((muon, adamw)):
        group = found["param_groups"][number]
        state = {index: found["state"][index] for index in group["params"]}
        optimizer.load_state_dict({"state": state, "param_groups": [group]})
    assert _train(model, [muon, adamw], range(3, 6)) == pytest.approx(expected, rel=TOLERANCE)


def _shards(folder: str) -> None:
    """Save momentum of two ranks in shards that do not divide, beside the whole of it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    init_group()
    mesh = init_device_mesh("cpu", (2,))
    momentum = distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [Shard(0)])
    state = {"state": {"w": {"momentum": momentum.bfloat16()}}, "param_groups": [_group("w")]}
    dcp.save({"optim": state}, checkpoint_id=folder)


def _group(*names: str, **settings: Any) -> dict[str, Any]:
    group = {"params": list(names), "lr": 0.1, "mu": MU, "algorithm": "muon"} | settings
    return {key: value for key, value in group.items() if value is not None}


@pytest.mark.ranks
def test_shards_are_converted_one_by_one_and_rounded_once(tmp_path):
    """From bfloat16 to float32: products of bfloat16 numbers, rounded to float32."""
    run_ranks(2, _shards, str(tmp_path / "saved")).check()
    assert _convert(tmp_path / "saved", tmp_path / "new", "dion", "fsdp2") == 0
    stored = read_checkpoint(tmp_path / "new").tensors["optim.state.w.momentum_buffer"]
    assert sorted(chunk.sizes for chunk in stored.chunks) == [(3, 5), (4, 5)]
    found = {"optim": {"state": {"w": {"momentum_buffer": torch.zeros(7, 5)}}}}
    dcp.load(found, checkpoint_id=tmp_path / "new", no_dist=True)
    expected = (torch.arange(35.0).double() * (1 - MU)).float().reshape(7, 5)
    assert torch.equal(found["optim"]["state"]["w"]["momentum_buffer"], expected)


MATRIX = torch.ones(2, 3)
W = {"w": {"momentum": MATRIX}}
# What is wrong, the state and groups, flags after --from dion --to fsdp2, and the error.
REFUSED: dict[str, tuple[Any, list[Any], list[str], str]] = {
    "missing": ({}, [_group("w")], [], "state.w: expected momentum of Muon by dion, got nothing"),
    "of torch": (
        {"w": {"momentum_buffer": MATRIX}},
        [_group("w")],
        [],
        "expected momentum of Muon by dion, got momentum_buffer",
    ),
    "unknown state": (
        {"w": {"momentum": MATRIX, "Q": MATRIX}},
        [_group("w")],
        [],
        "expected momentum of Muon by dion, got Q, momentum",
    ),
    "unknown algorithm": (
        W,
        [_group("w", algorithm="normuon")],
        [],
        "expected algorithm 'muon' or 'adamw' of dion, got 'normuon'",
    ),
    "no algorithm": (W, [_group("w", algorithm=None)], [], "of dion, got 'nothing'"),
    "no number": (W, [_group("w", mu=None)], [], "param_groups.0.mu: expected a number, got not"),
    "two numbers": (W, [_group("w")], ["--momentum", "0.95"], "expected --momentum 0.95, got 0.9"),
    "one": (W, [_group("w", mu=1.0)], [], "expected a number from 0 to below 1, got 1.0"),
    "no group": (
        {**W, "v": {"momentum": MATRIX}},
        [_group("w")],
        [],
        "state.v: expected a parameter of a group",
    ),
    "AdamW's settings": (
        {**W, "b": {"momentum": MATRIX, "variance": MATRIX}},
        [_group("w"), _group("b", algorithm="adamw")],
        [],
        "param_groups.1: expected beta1, beta2, epsilon of AdamW, got no beta1",
    ),
    "no Muon": (
        {"b": {"momentum": MATRIX, "variance": MATRIX}},
        [_group("b", algorithm="adamw", beta1=0.9, beta2=0.9, epsilon=1e-8)],
        [],
        "expected momentum of Muon, got none",
    ),
    "SGD": (
        {"w": {"momentum_buffer": MATRIX}},
        [_group("w", momentum=0.9, dampening=0.0)],
        ["--from", "torch"],
        "expected settings of Muon (momentum) or AdamW (betas)",
    ),
    "to itself": (W, [_group("w")], ["--to", "xtuner"], "expected fsdp2 and one of dion, torch"),
    "to xtuner": (
        {"w": {"momentum_buffer": MATRIX}},
        [{"params": ["w"], "momentum": MU}],
        ["--from", "fsdp2", "--to", "xtuner"],
        "--to xtuner: expected an optimizer that loads momentum before its first step",
    ),
    "a format": (W, [_group("w")], ["--to", "fsdp_dtensor"], "or torch_dist and fsdp_dtensor"),
}


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_and_nothing_written(case, is_file, tmp_path, capsys):
    """One line for each problem, exit status 1, and no new file or folder."""
    state, groups, flags, error = REFUSED[case]
    content = {"optim": {"state": state, "param_groups": groups}}
    if is_file:
        torch.save(content, tmp_path / "saved")
    else:
        dcp.save(content, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert _convert(tmp_path / "saved", tmp_path / "new", "dion", "fsdp2", *flags) == 1
    assert error in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_torch_makes_a_file_of_a_converted_folder(form, tmp_path):
    """Nested names are kept beside the keys, which only join them."""
    model, optimizers = _build("xtuner")
    state = _state(model, optimizers, form) | {"rng": [MATRIX, MATRIX]}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert _convert(tmp_path / "saved", tmp_path / "new", "xtuner", "fsdp2") == 0
    dcp_to_torch_save(tmp_path / "new", tmp_path / "file")
    found = torch.load(tmp_path / "file")
    assert found.keys() == state.keys() and torch.equal(found["rng"][1], MATRIX)
    of_optimizer = found["train"]["optimizer"]
    if form == "flat":
        assert of_optimizer["state.0.weight.momentum_buffer"].shape == (10, 6)
    else:
        assert of_optimizer["state"]["0.weight"].keys() == {"momentum_buffer"}
        assert of_optimizer["param_groups"][0]["momentum"] == MU


def test_momentum_is_taken_from_the_flag_if_the_checkpoint_has_none(tmp_path):
    """As for a state whose groups were dropped."""
    content = {"state": W, "param_groups": [_group("w", mu=None)]}
    torch.save(content, tmp_path / "saved")
    arguments = (tmp_path / "saved", tmp_path / "new", "dion", "fsdp2")
    assert _convert(*arguments, "--momentum", "0.75") == 0
    found = torch.load(tmp_path / "new")
    assert torch.equal(found["state"]["w"]["momentum_buffer"], 0.25 * MATRIX)
    assert found["param_groups"][0]["momentum"] == 0.75


def test_paths_and_files_that_do_not_fit_are_refused(tmp_path, capsys):
    """A target that exists stays; a source is a state of an optimizer, and runs no code."""
    (tmp_path / "new").write_text("kept")
    torch.save({"optim": {"state": W, "param_groups": [_group("w")]}}, tmp_path / "saved")
    torch.save({"w": MATRIX}, tmp_path / "model")
    (tmp_path / "text").write_text("no archive")
    torch.save({"state": W, "param_groups": [_group("w", lr=_Harmful())]}, tmp_path / "harmful")
    dcp.save({"model": {"w": MATRIX}}, checkpoint_id=tmp_path / "folder", no_dist=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    for source, target, error in (
        ("saved", "new", "expected a path to write to, got one that exists"),
        ("model", "other", "expected a state dict of an optimizer"),
        ("text", "other", "expected a file of torch.save"),
        ("harmful", "other", "expected a file of torch.save that weights_only=True reads"),
        ("folder", "other", "expected keys state.* and param_groups.* of an optimizer"),
        ("none", "other", "expected the tracker of a --save folder"),
    ):
        assert _convert(tmp_path / source, tmp_path / target, "dion", "fsdp2") == 1
        assert error in capsys.readouterr().err
    assert (tmp_path / "new").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


class _Harmful:
    """Pickles as a call."""

    def __reduce__(self):
        return print, ("ran",)
