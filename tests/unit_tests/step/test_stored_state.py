# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Float32 copies follow bfloat16 parameters that somebody changes between steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.device import device, init_group
from helpers.fsdp2_models import drawn
from helpers.ranks import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from megatron_muon.fsdp2 import Muon


def _followed(main: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the copy that the next step begins with."""
    return torch.where(main.to(own.dtype) == own, main, own)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _step_by_nothing(muon: Muon) -> None:
    """Step with a learning rate of 0, after which copies are as the step found them."""
    for group in muon.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    muon.step()


def _load_in_place(model: torch.nn.Module, target: Any, folder: str) -> None:
    dcp.save({"weight": target}, checkpoint_id=folder)
    dcp.load({"weight": model.state_dict()["weight"]}, checkpoint_id=folder)


# How weights change, with the effect on the versions of DTensor and local tensor in torch 2.15.
WAYS: dict[str, Callable[[Any, Any, str], Any]] = {
    # Of the DTensor.
    "copy_": lambda model, target, _: model.weight.copy_(target),
    "load_state_dict": lambda model, target, _: model.load_state_dict({"weight": target}),
    "set_model_state_dict": lambda model, target, _: set_model_state_dict(
        model,
        {"weight": target.full_tensor()},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
    # Of the local tensor.
    "to_local": lambda model, target, _: model.weight.to_local().copy_(target.to_local()),
    # Of neither.
    "data": lambda model, target, _: model.weight.data.copy_(target),
    "foreach": lambda model, target, _: torch._foreach_mul_(
        [model.weight], [target / model.weight]
    ),
    "dcp.load": _load_in_place,
    "memory": lambda model, target, _: model.weight._local_tensor.data.view(torch.int16).copy_(
        target._local_tensor.view(torch.int16)
    ),
}


def _change_weights(folder: str) -> None:
    init_group()
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = torch.nn.Module()
    model.forward = lambda: None  # type: ignore[assignment]
    model.weight = torch.nn.Parameter(drawn((10, 6), 0).bfloat16().to(device()))
    fully_shard(model, mesh=mesh)
    muon = Muon(list(model.named_parameters()), lr=1e-3)
    param: Any = model.weight
    param.grad = distribute_tensor(drawn((10, 6), 1).bfloat16().to(device()), mesh)
    param.grad = param.grad.redistribute(placements=param.placements)
    muon.step()
    main = muon.state[param]["main_param"].to_local()
    for number, (name, change) in enumerate(WAYS.items()):
        target = param.detach().clone()
        target.to_local()[:, 0] = 2.0 + number
        before = main.clone()
        with torch.no_grad():
            change(model, target, f"{folder}/{number}")
        assert model.weight is param
        expected = _followed(before, param.to_local().clone())
        assert (expected[:, 0] != before[:, 0]).all(), name
        _step_by_nothing(muon)
        assert torch.equal(muon.state[param]["main_param"].to_local(), expected), name
        assert torch.equal(param.to_local(), expected.bfloat16()), name
        # Other elements keep what bfloat16 lacks.
        assert (expected[:, 1:] != expected[:, 1:].bfloat16()).any(), name
        main = muon.state[param]["main_param"].to_local()


@pytest.mark.ranks
def test_weight_that_is_changed_in_any_way_counts(tmp_path):
    """A weight that is changed in any way counts, whatever its version says."""
    run_ranks(2, _change_weights, str(tmp_path)).check()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_copies_follow_to_the_bit(is_transposed):
    """Copies follow NaN, infinity, signed zeros and the smallest numbers to the bit."""
    smallest = 2.0**-133
    own = drawn((8, 6), 0).bfloat16()
    own[0] = torch.tensor([0.0, -0.0, smallest, -smallest, 2 * smallest, 1.0])
    own[1] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.3e38, 1.0, 1.0])
    own = own.to(device())
    param = torch.nn.Parameter(own.T.contiguous().T if is_transposed else own)
    other = torch.nn.Parameter(drawn((5, 4), 2).bfloat16().to(device()))
    muon = Muon([param, other], lr=1e-3, weight_decay=0.0)
    state = muon.muon_step.state()
    mains = [state[each]["main_param"] for each in (param, other)]
    for main in mains:
        # Less than half of a step of bfloat16.
        main.mul_(1 + 2.0**-12)
    old = [main.clone() for main in mains]
    _follow(muon)
    assert all(map(torch.equal, map(_bits, mains[1:]), map(_bits, old[1:])))
    with torch.no_grad():
        param.data[0] = torch.tensor([smallest, smallest, 2 * smallest, smallest, 0.0, -0.0])
        param.data[1, 2:] = torch.tensor([1.0, torch.nan, torch.inf, -1.0])
        param.data[2, 0].copy_(torch.nextafter(param.data[2, 0], param.data[2, 0] + 1))
        param.data[3].neg_()
    expected = [_followed(*pair) for pair in zip(old, (param, other), strict=True)]
    _follow(muon)
    for main, right in zip(mains, expected, strict=True):
        assert torch.equal(main.isnan(), right.isnan())
        assert torch.equal(_bits(main.nan_to_num(7.0)), _bits(right.nan_to_num(7.0)))


def _follow(muon: Muon) -> None:
    with torch.no_grad():
        assert muon.muon_step.reserve() == []
        muon.muon_step._main_params.follow(muon.muon_step.state())
    muon.muon_step.release()


def test_weight_that_is_changed_around_a_refused_step_counts():
    """Changes before and after a refused step both count."""
    param = torch.nn.Parameter(drawn((6, 9), 0).bfloat16().to(device()))
    muon = Muon([param], lr=1e-3)
    param.grad = torch.ones_like(param)
    muon.step()
    expected = muon.state[param]["main_param"].clone()
    for column in range(2):
        param.data[:, column] = 2.0 + column
        expected[:, column] = 2.0 + column
        param.grad = torch.full_like(param, torch.nan)
        if column == 0:
            with pytest.raises(RuntimeError, match="Nothing was updated"):
                muon.step()
    _step_by_nothing(muon)
    assert torch.equal(muon.state[param]["main_param"], expected)


def test_step_without_a_comparison_compares():
    """A step of the core alone follows changed weights too."""
    param = torch.nn.Parameter(drawn((6, 9), 0).bfloat16().to(device()))
    muon = Muon([param], lr=1e-3)
    for value in (2.0, 3.0):
        param.data[:, 0] = value
        muon.param_groups[0]["lr"] = 0.0
        param.grad = torch.ones_like(param)
        muon.muon_step.step()
        assert muon.state[param]["main_param"][:, 0].eq(value).all()
