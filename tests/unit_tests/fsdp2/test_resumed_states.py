# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs that go on from a checkpoint with other ranks: one optimizer, two, and adaptive Muon."""

import copy
import functools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.device import device, init_group
from helpers.fsdp2_models import (
    draw_grads,
    drawn,
    load_state,
    local,
    mixed_model,
    save_state,
    stored,
)
from helpers.ranks import on_ranks, run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW, parameter_groups

pytestmark = pytest.mark.ranks

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


class RowRMS:
    """A method of a user: rows keep the mean square that they had on average."""

    def state_shape(self, rows: int, cols: int) -> tuple[int, int]:
        return rows, 1

    def __call__(self, results: Any, state: Any) -> Any:
        squares = results.square().mean(2, keepdim=True)
        state.lerp_(squares, 0.05)
        return results * (state / squares).sqrt()


METHODS: dict[str, Any] = {name: name for name in ("normuon", "namo", "adamuon")}
METHODS["of a user"] = RowRMS()
# How states are saved, and how they are loaded.
WAYS = [
    ("one", "one"),
    ("two", "one"),
    ("two", "two"),
    ("torch", "unnamed"),
    ("bfloat16", "bfloat16"),
    ("CPU memory", "CPU memory"),
    ("offloaded", "one"),
    ("one", "offloaded"),
    *((method, method) for method in METHODS),
]


def _sharded(model: torch.nn.Module, shape: list[int], kind: str = "") -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device().type, tuple(shape), mesh_dim_names=names)
    in_cpu_memory = CPUOffloadPolicy(pin_memory=False)
    policy = in_cpu_memory if kind == "CPU memory" else OffloadPolicy()
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def _adaptive(method: str, shape: list[int]) -> tuple[Any, list[Any]]:
    """Return a model of query, key and value, a tall matrix, experts and a bias."""
    model = torch.nn.Module()
    shapes = {"qkv": (16, 6), "tall": (9, 4), "experts": (4, 3, 5), "bias": (7,)}
    for i, (name, of_param) in enumerate(shapes.items()):
        model.register_parameter(name, torch.nn.Parameter(drawn(of_param, i)))
    params = dict(_sharded(model, shape).named_parameters())
    groups = [
        {"params": [("qkv", params["qkv"])], "split_sizes": (4, 2, 2)},
        {"params": [(name, params[name]) for name in ("tall", "experts")]},
        {"params": [("bias", params["bias"])], "algorithm": "adamw"},
    ]
    exchange = ExchangeSettings(comm_dtype="fp32")
    return model, [MuonAdamW(groups, lr=0.05, adaptive=METHODS[method], exchange=exchange)]


def _build(kind: str, shape: list[int]) -> tuple[Any, list[Any]]:
    """Return a model, and one optimizer, Muon and AdamW, or Muon without names, torch's or ours."""
    if kind in METHODS:
        return _adaptive(kind, shape)
    model = mixed_model().bfloat16() if kind == "bfloat16" else mixed_model()
    model = _sharded(model, shape, kind)
    if kind in ("one", "bfloat16", "CPU memory", "soap", "offloaded"):
        options_of = {"soap": {"optimizer_class": "soap"}, "offloaded": {"offload_state": True}}
        more: dict[str, Any] = options_of.get(kind, {})
        return model, [MuonAdamW.from_model(model, lr=0.1, **more)]
    by_algorithm: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for group in parameter_groups(model):
        by_algorithm[group.pop("algorithm")].append(group)
    adamw = torch.optim.AdamW(by_algorithm["adamw"], lr=0.1)
    if kind == "two":
        options: dict[str, Any] = {"nesterov": True, "scale_mode": "match_adamw"}
        return model, [Muon(by_algorithm["muon"], lr=0.1, **options), adamw]
    matrices = [param for group in by_algorithm["muon"] for param in group["params"]]
    # Torch's steps round otherwise: matrices stay, and momentum goes on.
    return model, [{"torch": torch.optim.Muon, "unnamed": Muon}[kind](matrices, lr=0.0), adamw]


def _step(model: Any, optimizers: list[Any], seed: int) -> None:
    draw_grads(model.parameters(), seed)
    for each in optimizers:
        each.step()


def _step_without_gradient(model: Any, optimizer: Any) -> None:
    """Step where one matrix has no gradient; its state stays, whoever owns it.

    Its momentum is exchanged all the same, and an owner without its rows averaged its result.
    """

    def tensors(number: int) -> list[Any]:
        """Return the state of the qkv, or of the tall matrix, as it is saved."""
        values = optimizer.state_dict()["state"][number].values()
        return [local(value).clone() for value in values if torch.is_tensor(value)]

    before = [tensors(number) for number in (0, 1)]
    draw_grads(model.parameters(), 9)
    model.tall.grad = None
    optimizer.step()
    assert all(map(torch.equal, before[1], tensors(1)))
    for old, new in zip(before[0], tensors(0), strict=True):
        assert not new.numel() or not torch.equal(old, new)


def _save(folder: str) -> None:
    init_group()
    for kind in dict(WAYS):
        model, optimizers = _build(kind, [torch.distributed.get_world_size()])
        for step in range(3):
            _step(model, optimizers, step)
            for is_flat in (False, True) if step else ():
                options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
                save_state(f"{folder}/{kind}_{is_flat}_{step}", model, optimizers, options)
        if kind in METHODS:
            _step_without_gradient(model, *optimizers)


def _load(folder: str, shape: list[int]) -> None:
    """Load on other ranks, go on, and compare with the run that did."""
    init_group()
    for saved, kind, is_flat in ((*way, form) for way in WAYS for form in (False, True)):
        runs = []
        for step in (1, 2):
            model, optimizers = _build(kind, shape)
            for param in model.parameters():
                torch.nn.init.constant_(param, 7.0)
            if kind in METHODS:
                # Its state exists, with other values.
                _step(model, optimizers, 8)
            options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
            load_state(f"{folder}/{saved}_{is_flat}_{step}", model, optimizers, options)
            if kind in METHODS:
                # In other memory, as torch.load has it.
                optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            if step == 1:
                _step(model, optimizers, 2)
            states = [each.state_dict()["state"].values() for each in optimizers]
            values = [value for of_one in states for state in of_one for value in state.values()]
            tensors = filter(torch.is_tensor, values)
            runs.append([local(each) for each in (*model.parameters(), *tensors)])
        # Owners have the state of NAMO.
        assert len(runs[0]) == len(runs[1]) > (6 if kind in METHODS else 25)
        assert all(map(torch.equal, *runs)), (saved, kind, is_flat)


def test_state_loads_on_other_ranks(tmp_path):
    """State of one optimizer or two goes on to the bit on other numbers of ranks."""
    run_ranks(2, _save, str(tmp_path)).check()
    run_ranks(3, _load, str(tmp_path), [3]).check()
    run_ranks(4, _load, str(tmp_path), [2, 2]).check()


class _LateWriter(dcp.FileSystemWriter):
    """Write when training has gone on."""

    may_write = threading.Event()

    def write_data(self, *args: Any) -> Any:
        """Wait for the steps that follow."""
        self.may_write.wait()
        return super().write_data(*args)


@pytest.mark.parametrize(
    "kind",
    ["one", *(slow(kind) for kind in ("CPU memory", "bfloat16", "normuon", "soap", "offloaded"))],
)
@on_ranks(2)
def test_asynchronous_save_of_torch_has_the_bits_of_a_save(kind, tmp_path):
    """Steps that run while ``dcp.async_save`` writes change nothing in what it writes."""
    model, optimizers = _build(kind, [2])
    for step in range(2):
        _step(model, optimizers, step)
    save_state(f"{tmp_path}/whole", model, optimizers)
    state = dict(zip("mo", get_state_dict(model, optimizers), strict=True))
    group = dist.new_group(backend="gloo")
    saved = dcp.async_save(
        state, storage_writer=_LateWriter(tmp_path / "late"), process_group=group
    )
    for step in range(2, 4):
        _step(model, optimizers, step)
    _LateWriter.may_write.set()
    saved.result()
    expected, found = stored(tmp_path / "whole"), stored(tmp_path / "late")
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
