# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Version 2 of Megatron-FSDP without Megatron's trainer, of the generation that is installed.

``check_compat.py --megatron DIR --steps fsdp_v2`` runs it with Megatron-LM main, which has
more layouts than releases.
"""

import gc
from collections.abc import Callable
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


def _train(net: ShardedNet, is_one: bool, **sharding: Any) -> None:
    """Take three steps of two microbatches beside whole matrices."""
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
    assert differences(net.parameters, optimizer, reference.wholes()) == []
    if is_one:
        for vector, param in zip(vectors, net.vectors.values(), strict=True):
            assert torch.equal(vector, param.to_local())


def _train_all() -> None:
    """Train in every layout of this number of ranks, with gradients of two microbatches."""
    for layout in layouts():
        if dist.get_world_size() == 3 and "h" in layout:
            continue
        _train(ShardedNet(layout, **SHARED), True)
        _train(ShardedNet(layout, **UNITS), False)
    # Gradients in bfloat16 beside weights in float32, cast by Megatron-FSDP or not.
    for aware in (False, True) if has_grad_dtype() else ():
        net = ShardedNet("zero3", **SHARED, has_bias=False, dtype="bfloat16")
        assert next(iter(net.named.values())).dtype == torch.float32
        _train(net, False, precision_aware=aware)
    # Somebody holds nothing of a matrix, somebody else a part of it that is not even.
    net = ShardedNet("zero3", **SHARED)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, [len(each.to_local()) for each in net.matrices.values()])
    assert any(0 in rows for rows in by_rank)
    assert any(
        len({*column}) > 1 and sorted(column)[-2] > 0 for column in zip(*by_rank, strict=True)
    )


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


def _save(folder: str) -> None:
    """Save after a step, in each layout and way; files have whole matrices."""
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
        assert differences(net.parameters, optimizer, reference.wholes()) == []
        if dist.get_rank() == 0:
            torch.save([saved, reference.wholes()], f"{folder}/{layout}")
            for way in _ways():
                dcp_to_torch_save(f"{folder}/{layout} {way}", f"{folder}/file")
                file = torch.load(f"{folder}/file")
                for key, whole in saved.items():
                    name, _, what = key.rpartition(".")
                    states = {**file["optimizer"]["state"][name], "value": file["model"][name]}
                    assert torch.equal(states[what], whole), key
    dist.barrier()


def _load(folder: str) -> None:
    for layout in layouts():
        saved, expected = torch.load(f"{folder}/{layout}")
        for way, (_, load) in _ways().items():
            into = layout if dist.get_world_size() == 4 else "zero3"
            net, optimizer = _build_to_save(into, seed=50)
            load(net, optimizer, f"{folder}/{layout} {way}")
            for key, (name, tensor) in _tensors(net, optimizer).items():
                assert torch.equal(tensor.to_local(), net.own(name, saved[key])), (layout, way, key)
            net.set_grads(1)
            optimizer.step()
            assert differences(net.parameters, optimizer, expected) == [], (layout, way)


def _assert_refused(said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError) as error:
        call()
    assert said in str(error.value)
    # A sentence a module, not a matrix.
    assert str(error.value).count("for which Megatron-FSDP") <= 2


def _refuse_gradients() -> None:
    """Step without a gradient of one parameter.

    It keeps Megatron-FSDP from reducing those of its whole module: it was left out of every step,
    with all others of its module, and nothing was said.
    """
    lacks = "expected gradients of all parameters of its module, got"
    module = "['layers.3.weight', 'layers.3.bias', 'layers.4.weight', 'layers.4.bias'], for which"
    for is_one, said in (
        (False, f"layers.4.weight: {lacks} none of {module}"),
        (True, f"layers.4.bias: {lacks}"),
    ):
        net = ShardedNet("zero3", **SHARED)
        optimizer = _build(net, is_one)
        net.backward(0, num_used=3)
        before = {each: param.to_local().clone() for each, param in net.named.items()}
        _assert_refused(said, optimizer.step)
        assert all(torch.equal(before[each], net.named[each].to_local()) for each in before)
    if has_grad_dtype():
        net = ShardedNet("zero3", **SHARED, dtype="bfloat16")
        optimizer = _build(net, True)
        module_of("experimental").fully_shard_optimizer(optimizer, precision_aware=True)
        net.backward(0)
        _assert_refused("layers.0.bias: expected a gradient like the parameter", optimizer.step)
    # A layer that nothing uses is skipped as a whole.
    net = ShardedNet("zero3", **UNITS)
    optimizer = _build(net, False)
    net.backward(0, num_used=2)
    optimizer.step()


def _refuse_to_build() -> None:
    """Build Muon of gathered weights, and of parameters whose model is gone."""
    net = ShardedNet("zero3", **SHARED)
    calls = []

    def build_in_forward(module: torch.nn.Module, *_: object) -> None:
        said = "w: expected a DTensor in a job of 2 ranks, got a plain tensor"
        _assert_refused(said, lambda: Muon([("w", module.weight)]))
        calls.append(module)

    handle = net.model.layers[0].register_forward_hook(build_in_forward)
    net.backward(0)
    handle.remove()
    assert calls
    if is_main():
        params = list(net.matrices.items())
        del net
        gc.collect()
        said = "layers.0.weight: expected a parameter of a model that exists, got one of none"
        _assert_refused(said, lambda: Muon(params))


def _run_all(folder: str) -> None:
    init_group()
    num_ranks = dist.get_world_size()
    _train_all()
    if num_ranks == 4:
        _save(folder)
    _load(folder)
    if num_ranks == 2:
        _refuse_gradients()
        _refuse_to_build()


def test_steps_and_loads_are_those_of_whole_matrices(tmp_path):
    """Steps and checkpoints of version 2 have the bits of whole matrices in every layout."""
    for num_ranks in (4, 3, 2):
        # main has more layouts.
        run_ranks(num_ranks, _run_all, str(tmp_path), timeout_s=600.0).check()
