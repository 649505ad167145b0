# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Version 2 of Megatron-FSDP without Megatron's trainer, of the generation that is installed.

``check_compat.py --megatron DIR --steps fsdp_v2`` runs it with Megatron-LM main, which has
more layouts than releases.
"""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.device import init_group
from helpers.megatron_fsdp import ShardedNet, has_grad_dtype, is_main, layouts, module_of
from helpers.ranks import run_ranks
from helpers.whole_matrices import WholeMuon, differences
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

MUON = {"lr": 0.02, "weight_decay": 0.1, "nesterov": True}
# One buffer of all: rows that do not divide, small matrices in gaps. Or a buffer of each layer: a
# single row, and a convolution, which is stepped as (6, 18).
SHARED = {"shapes": [[34, 4], [7, 6], [2, 3], [5, 4], [1, 12]]}
UNITS = {"shapes": [[16, 8], [1, 4], [6, 2, 3, 3]], "units": True}


def _build(net: ShardedNet, is_one: bool) -> Any:
    """Return Muon for the matrices, or one optimizer with AdamW for the vectors too."""
    groups: list[dict[str, Any]] = [
        {"params": [(name, param)], **each.keys}
        for (name, param), each in zip(net.matrices.items(), net.parameters, strict=True)
    ]
    settings = {**MUON, "exchange": ExchangeSettings(comm_dtype="fp32", max_owners=1)}
    if not is_one:
        return Muon(groups, **settings)
    vectors = {"params": list(net.vectors.items()), "algorithm": "adamw"}
    return MuonAdamW([*groups, vectors], scale_mode="spectral", **settings)


def _train(net: ShardedNet, is_one: bool, **sharding: Any) -> list[str]:
    """Take three steps of two microbatches beside whole matrices, and list what differs."""
    optimizer = _build(net, is_one)
    module_of("experimental").fully_shard_optimizer(optimizer, **sharding)
    reference = WholeMuon(net.parameters, **MUON)
    # Elementwise, so of this rank's elements.
    vectors = [torch.nn.Parameter(each.to_local().clone()) for each in net.vectors.values()]
    adamw = torch.optim.AdamW(
        [{"params": vectors}], lr=MUON["lr"], weight_decay=MUON["weight_decay"]
    )
    for step in range(3):
        net.model.zero_grad()
        net.backward(step, num_microbatches=2)
        reference.step([net.whole(name, param.grad) for name, param in net.matrices.items()])
        for vector, param in zip(vectors, net.vectors.values(), strict=True):
            vector.grad = param.grad.to_local().clone()
        adamw.step()
        optimizer.step()
    found = differences(net.parameters, optimizer, reference.wholes())
    if is_one:
        pairs = zip(vectors, net.vectors.items(), strict=True)
        found += [name for ours, (name, p) in pairs if not torch.equal(ours, p.to_local())]
    return found


def _train_all() -> dict[str, Any]:
    """Train in every layout of this number of ranks; also list rows by rank."""
    found = {}
    for layout in layouts():
        if dist.get_world_size() == 3 and "h" in layout:
            continue
        for name, settings, is_one in (("shared", SHARED, True), ("units", UNITS, False)):
            net = ShardedNet(layout, **settings)
            rows = [len(param.to_local()) for param in net.matrices.values()]
            found[f"{layout}, {name}"] = [rows, _train(net, is_one)]
    # Gradients in bfloat16 beside weights in float32, cast by Megatron-FSDP or not.
    for aware in (False, True) if has_grad_dtype() else ():
        net = ShardedNet("zero3", **SHARED, has_bias=False, dtype="bfloat16")
        assert next(iter(net.named.values())).dtype == torch.float32
        found[f"precision_aware={aware}"] = [[], _train(net, False, precision_aware=aware)]
    return found


def _state(net: ShardedNet, optimizer: Any) -> dict[str, Any]:
    state = dict(zip(("model", "optimizer"), get_state_dict(net.model, optimizer), strict=True))
    module_of("uneven_dtensor").preprocess_state_dict_for_uneven_dtensor(state)
    return state


def _save_plain(net: ShardedNet, optimizer: Any, folder: str) -> None:
    dcp.save(_state(net, optimizer), checkpoint_id=folder)


def _load_plain(net: ShardedNet, optimizer: Any, folder: str) -> None:
    state = _state(net, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model, of_optimizer = state["model"], state["optimizer"]
    set_state_dict(net.model, optimizer, model_state_dict=model, optim_state_dict=of_optimizer)


def _ways() -> dict[str, Any]:
    """Return functions that save and load, by name."""
    ways = {"plain": (_save_plain, _load_plain)}
    if is_main():
        own = module_of("experimental")
        ways["main"] = tuple(
            (lambda net, *others, call=call: call(net.model, *others))
            for call in (own.save_checkpoint, own.load_checkpoint)
        )
    return ways


def _tensors(net: ShardedNet, optimizer: Any) -> dict[str, Any]:
    """Return parameters and their states by name."""
    return {
        f"{name}.{key}": (name, tensor)
        for name, param in net.named.items()
        for key, tensor in {"value": param.detach(), **optimizer.state[param]}.items()
        if key != "step"
    }


def _build_to_save(layout: str, seed: int = 0) -> tuple[ShardedNet, Any]:
    net = ShardedNet(layout, **SHARED, seed=seed)
    optimizer = _build(net, True)
    module_of("experimental").fully_shard_optimizer(optimizer)
    return net, optimizer


def _save(folder: str) -> list[str]:
    """Save after a step, in each layout and way; list what differs, in files too."""
    different = []
    for layout in layouts():
        net, optimizer = _build_to_save(layout)
        reference = WholeMuon(net.parameters, **MUON)
        for step in range(2):
            grads = net.set_grads(step)
            optimizer.step()
            reference.step([grads[name] for name in net.matrices])
            if step == 0:
                tensors = _tensors(net, optimizer)
                saved = {key: net.whole(*tensors[key]) for key in tensors}
                for way, (save, _) in _ways().items():
                    save(net, optimizer, f"{folder}/{layout} {way}")
        different += differences(net.parameters, optimizer, reference.wholes())
        if dist.get_rank() == 0:
            torch.save([saved, reference.wholes()], f"{folder}/{layout}")
            for way in _ways():
                dcp_to_torch_save(f"{folder}/{layout} {way}", f"{folder}/file")
                file = torch.load(f"{folder}/file")
                for key, whole in saved.items():
                    name, _, what = key.rpartition(".")
                    states = {**file["optimizer"]["state"][name], "value": file["model"][name]}
                    different += [key] if not torch.equal(states[what], whole) else []
    return different


def _load(folder: str) -> dict[str, list[list[str]]]:
    """Load what each layout has saved, and make the next step."""
    found = {}
    for layout in layouts():
        saved, expected = torch.load(f"{folder}/{layout}")
        for way, (_, load) in _ways().items():
            into = layout if dist.get_world_size() == 4 else "zero3"
            net, optimizer = _build_to_save(into, seed=50)
            load(net, optimizer, f"{folder}/{layout} {way}")
            loaded = [
                key
                for key, (name, tensor) in _tensors(net, optimizer).items()
                if not torch.equal(tensor.to_local(), net.own(name, saved[key]))
            ]
            net.set_grads(1)
            optimizer.step()
            found[f"{layout}, {way}"] = [loaded, differences(net.parameters, optimizer, expected)]
    return found


def _error_of(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def _steps_without_all_gradients() -> dict[str, str]:
    """Return the errors of steps; raise if one has changed a parameter."""
    errors = {}
    for name, is_one in (("unused", False), ("unused vector", True)):
        net = ShardedNet("zero3", **SHARED)
        optimizer = _build(net, is_one)
        net.backward(0, num_used=3)
        before = {each: param.to_local().clone() for each, param in net.named.items()}
        errors[name] = _error_of(optimizer.step)
        assert all(torch.equal(before[each], net.named[each].to_local()) for each in before)
    if has_grad_dtype():
        net = ShardedNet("zero3", **SHARED, dtype="bfloat16")
        optimizer = _build(net, True)
        module_of("experimental").fully_shard_optimizer(optimizer, precision_aware=True)
        net.backward(0)
        errors["bf16 for AdamW"] = _error_of(optimizer.step)
    # A layer that nothing uses is skipped as a whole.
    net = ShardedNet("zero3", **UNITS)
    optimizer = _build(net, False)
    net.backward(0, num_used=2)
    errors["unused layer"] = _error_of(optimizer.step)
    return errors


def _refuse() -> dict[str, str]:
    errors = _steps_without_all_gradients()
    net = ShardedNet("zero3", **SHARED)

    def build_in_forward(module: torch.nn.Module, *_: object) -> None:
        errors["gathered"] = _error_of(lambda: Muon([("w", module.weight)]))

    handle = net.model.layers[0].register_forward_hook(build_in_forward)
    net.backward(0)
    handle.remove()
    if is_main():
        params = list(net.matrices.items())
        del net
        gc.collect()
        errors["gone"] = _error_of(lambda: Muon(params))
    return errors


def _run_all(folder: str) -> dict[str, Any]:
    """Run everything in one world of ranks; four of them save what all load."""
    init_group()
    num_ranks = dist.get_world_size()
    trained, saved = _train_all(), _save(folder) if num_ranks == 4 else []
    dist.barrier()
    refused = _refuse() if num_ranks == 2 else {}
    return {"trained": trained, "saved": saved, "loaded": _load(folder), "refused": refused}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Return what ranks found, by their number."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return {size: run_ranks(size, _run_all, folder).check().results for size in (4, 3, 2)}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_steps_are_those_of_whole_matrices(worlds, num_ranks):
    """In each layout, with gradients of two microbatches, through ``fully_shard_optimizer``."""
    by_rank = [found["trained"] for found in worlds[num_ranks]]
    for case in by_rank[0]:
        assert [each[case][1] for each in by_rank] == [[]] * num_ranks, case
    # Somebody holds nothing of a matrix, somebody else a part of it that is not even.
    shared = [each["zero3, shared"][0] for each in by_rank]
    assert any(0 in rows for rows in shared)
    assert any(
        len({*column}) > 1 and sorted(column)[-2] > 0 for column in zip(*shared, strict=True)
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_checkpoints_load_on_other_ranks(worlds, num_ranks):
    """With upstream's chunks, by torch's functions and main's own; files have whole matrices."""
    assert [found["saved"] for found in worlds[4]] == [[]] * 4
    for found in worlds[num_ranks]:
        loaded = found["loaded"]
        assert loaded and all(each == [[], []] for each in loaded.values()), loaded


def test_refusals_name_the_parameter_on_all_ranks(worlds):
    """At construction or in the first step, which changes nothing.

    A parameter without a gradient keeps Megatron-FSDP from reducing those of its whole module: it
    was left out of every step, with all others of its module, and nothing was said.
    """
    expected = {
        "unused": "layers.4.weight: expected gradients of all parameters of its module, got none "
        "of ['layers.3.weight', 'layers.3.bias', 'layers.4.weight', 'layers.4.bias'], for which",
        "unused vector": "layers.4.bias: expected gradients of all parameters of its module, got",
        "bf16 for AdamW": "layers.0.bias: expected a gradient like the parameter",
        "unused layer": "nothing",
        "gathered": "w: expected a DTensor in a job of 2 ranks, got a plain tensor",
        "gone": "layers.0.weight: expected a parameter of a model that exists, got one of none",
    }
    for errors in (found["refused"] for found in worlds[2]):
        assert set(expected) - set(errors) <= {"gone", "bf16 for AdamW"}
        for case, error in errors.items():
            assert expected[case] in error, case
            assert error.count("for which Megatron-FSDP") <= 2  # a sentence a module, not a matrix
