# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon's state through ``torch.distributed.checkpoint``, beside AdamW's, on other ranks."""

import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from helpers.device import device, init_group, kind
from helpers.ranks import run_ranks
from packaging.version import Version

pytestmark = pytest.mark.ranks


def _model(mesh_shape: list[int], muon_class: str) -> tuple[Any, list[Any]]:
    """Shard a model, and build Muon for its matrices and AdamW for the rest."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from megatron_muon.fsdp2 import ExchangeSettings, Muon

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 10),
        torch.nn.LayerNorm(10),
        torch.nn.Linear(10, 5),
        torch.nn.Linear(5, 2),
    )
    names = ("replica", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh(kind(), tuple(mesh_shape), mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = list(model.named_parameters())
    matrices = [(name, param) for name, param in named if param.ndim == 2]
    without_names = [param for _, param in matrices]
    if muon_class == "torch":
        muon: Any = torch.optim.Muon(without_names, lr=0.05)
    else:
        exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
        params = matrices if muon_class == "named" else without_names
        muon = Muon(params, lr=0.05, nesterov=True, exchange=exchange)
    rest = [param for _, param in named if param.ndim != 2]
    return model, [muon, torch.optim.AdamW(rest, lr=0.03)]


def _step(model: Any, optimizers: list[Any], steps: range) -> None:
    """Step with gradients that do not depend on the ranks."""
    from helpers.fsdp2_models import drawn
    from torch.distributed.tensor import distribute_tensor

    for step in steps:
        for number, param in enumerate(model.parameters()):
            grad = drawn(param.shape, 100 * step + number)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        for optimizer in optimizers:
            optimizer.step()


def _whole(model: Any, muon: Any) -> list[Any]:
    """Return all values, and all momentum."""
    momentum = [state["momentum_buffer"] for state in muon.state.values()]
    return [each.detach().full_tensor() for each in (*model.parameters(), *momentum)]


def _state(model: Any, optimizers: list[Any], is_flat: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    of_model, of_optimizers = get_state_dict(model, optimizers, options=options)
    return {"model": of_model, "optimizers": of_optimizers}


# Form of the state, class of Muon that saves it, and the one that loads it.
FORMS = {
    "nested": (False, "named", "named"),
    "flat": (True, "named", "named"),
}
# That of torch 2.12 and later refuses matrices with fewer rows than ranks.
if Version(version("torch")).release < (2, 12):
    FORMS["of torch"] = (False, "torch", "unnamed")


def _save(folder: str) -> None:
    """Train and save in each form, then train on and keep what comes out."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    init_group()
    for form, (is_flat, muon_class, _) in FORMS.items():
        model, optimizers = _model([dist.get_world_size()], muon_class)
        _step(model, optimizers, range(2))
        dcp.save(_state(model, optimizers, is_flat), checkpoint_id=f"{folder}/{form}")
        expected = [_whole(model, optimizers[0])]
        _step(model, optimizers, range(2, 4))
        expected.append(_whole(model, optimizers[0]))
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/{form} expected")


def _load(folder: str, mesh_shape: list[int], forms: list[str]) -> list[list[list[bool]]]:
    """Load each form on other ranks, train on, and compare."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    init_group()
    equal = []
    for form in forms:
        is_flat, _, muon_class = FORMS[form]
        model, optimizers = _model(mesh_shape, muon_class)
        state = _state(model, optimizers, is_flat)
        dcp.load(state, checkpoint_id=f"{folder}/{form}")
        set_state_dict(
            model,
            optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizers"],
            options=StateDictOptions(flatten_optimizer_state_dict=is_flat),
        )
        at_save, at_end = torch.load(f"{folder}/{form} expected", map_location=device())
        loaded = list(map(torch.equal, _whole(model, optimizers[0]), at_save))
        _step(model, optimizers, range(2, 4))
        equal.append([loaded, list(map(torch.equal, _whole(model, optimizers[0]), at_end))])
    return equal


def test_state_of_four_ranks_loads_on_others(tmp_path: Path):
    """Values and momentum are equal, and so are two more steps, to the bit.

    A run with torch's Muon can be taken over: its state has the same name and the same average. It
    rounds before its norm, so that its steps are others.
    """
    run_ranks(4, _save, str(tmp_path)).check()
    others = [form for form in FORMS if form != "nested"]
    for mesh_shape, forms in (([2, 2], ["nested"]), ([3], others)):
        run = run_ranks(math.prod(mesh_shape), _load, str(tmp_path), mesh_shape, forms)
        for results in run.check().results:
            for form, (loaded, trained) in zip(forms, results, strict=True):
                assert all(loaded) and len(loaded) == len(trained) == 11, form
                assert all(trained) == (form != "of torch"), form
