# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""state_dict() and load_state_dict() in a script on megatron-core, without megatron.training."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_runs import assert_same, joined, local_tensors
from helpers.ranks import run_ranks
from helpers.toy_fsdp import build_model, build_optimizer, run_backward

pytestmark = pytest.mark.ranks


def _train(num_steps: int, sharding: str) -> Any:
    model = build_model(sharding)
    optimizer = build_optimizer(model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        run_backward(model)
        optimizer.step()
    return optimizer


def _state(optimizer: Any) -> dict[str, torch.Tensor]:
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, local_tensors(optimizer))
    return {name: t for name, t in joined(shards).items() if not name.endswith(".param")}


def _save(folder: str, sharding: str) -> list[float]:
    optimizer = _train(3, sharding)
    optimizer.param_groups[0]["lr"] = 0.125
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    torch.save(_state(optimizer), f"{folder}_saved.pt")
    return _steps(optimizer)


def _load(folder: str, sharding: str) -> list[Any]:
    optimizer = _train(1, sharding)
    state_dict = optimizer.state_dict()
    dcp.load({"optimizer": state_dict}, checkpoint_id=folder)
    optimizer.load_state_dict(state_dict)
    torch.save(_state(optimizer), f"{folder}_loaded.pt")
    return [_steps(optimizer), optimizer.param_groups[0]["lr"]]


def _steps(optimizer: Any) -> list[float]:
    states = optimizer.state_dict()["state"].values()
    return [float(state["step"]) for state in states if "step" in state]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((3, "optim_grads_params"), (2, "optim")),
        pytest.param((2, "no_shard"), (4, "optim_grads"), marks=pytest.mark.slow),
    ],
)
def test_plain_dcp_saves_and_loads_the_state_dict_on_other_ranks(saved, loaded, tmp_path):
    """Plain DCP saves uneven rows, and step counts of empty shards, for other ranks."""
    folder = str(tmp_path / "checkpoint")
    first = run_ranks(saved[0], _save, folder, saved[1]).check()
    second = run_ranks(loaded[0], _load, folder, loaded[1]).check()
    expected = torch.load(f"{folder}_saved.pt")
    assert len(expected) > 10
    assert_same(torch.load(f"{folder}_loaded.pt"), expected)
    for steps in (*first.results, *(result[0] for result in second.results)):
        assert set(steps) == {3.0}
    assert all(result[1] == 0.125 for result in second.results)


def _load_what_does_not_fit() -> None:
    optimizer = _train(2, "optim_grads_params")
    before = _state(optimizer)
    other = copy.deepcopy(optimizer.state_dict())
    for state in other["state"].values():
        for value in state.values():
            getattr(value, "_local_tensor", value).fill_(5.0)
    names = sorted(name for name, state in other["state"].items() if "momentum_buffer" in state)
    wrong = copy.deepcopy(other)
    if dist.get_rank() == 1:
        del wrong["state"][names[0]]
        wrong["state"][names[1]] = {"exp_avg": wrong["state"][names[1]]["momentum_buffer"]}
        local = wrong["state"][names[2]]["momentum_buffer"]
        wrong["state"][names[2]]["momentum_buffer"] = local._local_tensor[:0]
        del wrong["param_to_group_meta"][names[3]]
    with pytest.raises(RuntimeError, match="Nothing was loaded") as error:
        optimizer.load_state_dict(wrong)
    for text in (
        *(f"state.{name}.momentum_buffer: expected DTensor of shape" for name in names[:3]),
        f"param_to_group_meta.{names[3]}: expected group settings, got nothing",
    ):
        assert f"rank 1: {text}" in str(error.value)
    assert_same(_state(optimizer), before)
    optimizer.load_state_dict(other)
    assert all(bool((tensor == 5.0).all()) for tensor in _state(optimizer).values())


def test_state_that_does_not_fit_is_refused_on_all_ranks():
    """A state that is wrong on one rank is loaded on none; one that fits is copied in place."""
    run_ranks(2, _load_what_does_not_fit).check()
