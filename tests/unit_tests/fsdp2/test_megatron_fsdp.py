# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Version 1 of Megatron-FSDP outside of its trainer; ``test_layouts.py`` has its steps."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.device import device, init_group
from helpers.fsdp2_models import drawn
from helpers.megatron_fsdp import EVEN, UNEVEN, Version1
from helpers.ranks import run_ranks
from helpers.whole_matrices import WholeMuon, differences

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

KINDS = {"even": EVEN, "uneven": UNEVEN}
# fully_shard_optimizer() makes a step, which would decay weights.
MUON = {"lr": 0.02, "weight_decay": 0.0, "nesterov": True}


def _set_grads(model: Version1, step: int) -> list[Any]:
    """Set gradients that do not depend on the ranks, and return the whole ones."""
    grads = [
        drawn(each.whole.shape, 1000 + 10 * step + i) for i, each in enumerate(model.parameters)
    ]
    for each, grad in zip(model.parameters, grads, strict=True):
        each.set_grad(grad)
    return grads


def _muon(model: Version1) -> Any:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_optimizer

    groups = [
        {"params": [(f"w{i}", each.param)], **each.keys} for i, each in enumerate(model.parameters)
    ]
    exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
    return fully_shard_optimizer(Muon(groups, exchange=exchange, **MUON))


def _refuse_tensor_made_of_shards() -> None:
    """No buffer says which rows others hold; to gather all shapes took minutes on 16,384 ranks."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    param = Version1("one_axis", *UNEVEN).parameters[0].param
    made = torch.nn.Parameter(param.detach().clone())
    uneven_dtensor.update_uneven_dtensor_chunk_metadata(made)
    with pytest.raises(RuntimeError) as error:
        Muon([("made", made)])
    for said in (
        "made: expected a parameter of a model of Megatron-FSDP",
        "Pass the parameter",
        "No optimizer was built.",
    ):
        assert said in str(error.value)


def _step_empty_shards_of_adamw() -> None:
    """Megatron-FSDP gathers every tensor of the state to save it: it hung where one was missing."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_optimizer

    # One buffer of all: its small last matrix is on one rank alone.
    model = Version1("one_axis", "Sequential", [[10, 8], [16, 10], [2, 16]])
    *matrices, last = (each.param for each in model.parameters)
    optimizer = fully_shard_optimizer(
        MuonAdamW([{"params": matrices}, {"params": [last], "algorithm": "adamw"}])
    )
    _set_grads(model, 0)
    optimizer.step(sync_grad_before_optimizer_step=False)
    # On all ranks together.
    optimizer.state_dict()
    assert last.grad is None or last.to_local().numel()
    assert {*optimizer.state[last]} == {"exp_avg", "exp_avg_sq", "step"}
    assert all({*optimizer.state[param]} == {"momentum_buffer"} for param in matrices)


def _state(model: Version1, muon: Any) -> dict[str, Any]:
    return {"model": model.model.state_dict(), "optimizer": muon.state_dict()}


def _save(folder: str) -> None:
    """Save after a step of HFSDP, and step on."""
    for kind, shapes in KINDS.items():
        model = Version1("hfsdp", *shapes)
        muon, reference = _muon(model), WholeMuon(model.parameters, **MUON)
        expected = []
        for step in range(2):
            reference.step(_set_grads(model, step))
            muon.step(sync_grad_before_optimizer_step=False)
            expected.append(reference.wholes())
            if step == 0:
                dcp.save(_state(model, muon), checkpoint_id=f"{folder}/{kind}")
        assert differences(model.parameters, muon, expected[1]) == []
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/{kind}/expected")
    dist.barrier()


def _load(folder: str, layouts: Sequence[str]) -> None:
    for layout, (kind, shapes) in itertools.product(layouts, KINDS.items()):
        model = Version1(layout, *shapes, seed=50)
        muon = _muon(model)
        state = _state(model, muon)
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        model.model.load_state_dict(state["model"])
        muon.load_state_dict(state["optimizer"])
        expected = torch.load(f"{folder}/{kind}/expected", map_location=device())
        assert differences(model.parameters, muon, expected[0]) == [], (layout, kind)
        _set_grads(model, 1)
        muon.step(sync_grad_before_optimizer_step=False)
        assert differences(model.parameters, muon, expected[1]) == [], (layout, kind)


def _on_four_ranks(folder: str) -> None:
    init_group()
    _save(folder)
    _load(folder, ["tensor_rows", "tensor_columns"])
    _refuse_tensor_made_of_shards()
    _step_empty_shards_of_adamw()


def _on_two_ranks(folder: str) -> None:
    init_group()
    _load(folder, ["one_axis_of_two"])


def test_state_of_hfsdp_loads_on_other_ranks(tmp_path):
    """A checkpoint of HFSDP goes on with the bits of whole matrices in other layouts."""
    run_ranks(4, _on_four_ranks, str(tmp_path)).check()
    run_ranks(2, _on_two_ranks, str(tmp_path)).check()
