# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One optimizer for all parameters, beside torch's own: schedules, copies, groups, late shards."""

import copy
import io
import os
from typing import Any

import pytest
import torch
from helpers.device import device
from helpers.fsdp2_models import (
    copies,
    draw_grads,
    equal,
    error_of,
    local,
    mixed_model,
    small_model,
    step,
)
from helpers.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_muon.fsdp2 import MuonAdamW

NUM_STEPS = 3
SCHEDULES = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=7),
    "cyclic": lambda optimizer: CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_changes_momentum_and_betas(name):
    """Schedules that cycle momentum change momentum of Muon and betas of AdamW."""
    model = mixed_model()
    theirs = copy.deepcopy(model)
    matrix, others = model.up.weight, [model.norm.weight, model.embed.weight]
    twins = [theirs.norm.weight, theirs.embed.weight]
    ours = MuonAdamW([{"params": [matrix]}, {"params": others, "algorithm": "adamw"}], lr=0.1)
    assert "momentum" not in ours.param_groups[1]
    adamw = torch.optim.AdamW(twins, lr=0.1)
    # Its momentum is what that of Muon's group should be.
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    schedules = [SCHEDULES[name](each) for each in (ours, adamw, sgd)]
    for number in range(6):
        draw_grads([*others, matrix], number)
        draw_grads(twins, number)
        for each in (ours, adamw, sgd):
            each.step()
        assert ours.param_groups[0]["momentum"] == sgd.param_groups[0]["momentum"]
        assert ours.param_groups[1]["betas"] == adamw.param_groups[0]["betas"]
        assert "betas" not in ours.param_groups[0]
        for schedule in schedules:
            schedule.step()
    assert all(map(torch.equal, others, twins))
    # A run that resumes goes on with the momentum of the checkpoint.
    last = ours.param_groups[1]["momentum"]
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert ours.param_groups[1]["momentum"] == last


def test_schedulers_copies_and_pickles_before_the_first_step():
    """An optimizer can be copied and pickled until it has process groups."""
    model = mixed_model()
    optimizer = MuonAdamW.from_model(model, lr=0.1)
    other = copy.deepcopy(model)
    copied = copy.deepcopy(optimizer)
    for group, copied_group in zip(optimizer.param_groups, copied.param_groups, strict=True):
        by_name = dict(other.named_parameters())
        copied_group["params"] = [by_name[name] for name in group["param_names"]]
    stream = io.BytesIO()
    torch.save(optimizer, stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=False).algorithms == optimizer.algorithms
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, copied)]
    for number in range(NUM_STEPS):
        for each, scheduled, schedule in (
            (model, optimizer, schedules[0]),
            (other, copied, schedules[1]),
        ):
            draw_grads(each.parameters(), number)
            scheduled.step()
            schedule.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.1 * 0.5**NUM_STEPS}
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, theirs)
    with pytest.raises(TypeError, match="expected no copy once the exchange"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("elementwise", ["adamw", "lion"])
def test_hooks_of_all_optimizers_run_once_a_step(elementwise):
    """Global hooks run once a step, and not for inner optimizers or probes."""
    model = mixed_model()
    optimizer = MuonAdamW.from_model(model, lr=0.1, elementwise=elementwise)
    before: list[Any] = []
    calls: list[Any] = []

    def after(stepped: Any, *_: Any) -> None:
        are_changed = [not torch.equal(*pair) for pair in zip(before, params, strict=True)]
        calls.append(("after", stepped, all(are_changed)))

    params = list(model.parameters())
    handles = [
        register_optimizer_step_pre_hook(lambda stepped, *_: calls.append(("before", stepped))),
        register_optimizer_step_post_hook(after),
    ]
    try:
        for number in range(2):
            draw_grads(params, number)
            before[:] = [param.detach().clone() for param in params]
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [("before", optimizer), ("after", optimizer, True)] * 2


def test_groups_may_be_added_until_the_first_step():
    """Groups that are added before the first step have the defaults of their algorithm."""
    model = mixed_model()
    optimizer = MuonAdamW([{"params": [model.up.weight], "algorithm": "muon"}], lr=0.1)
    optimizer.add_param_group({"params": [model.norm.weight], "algorithm": "lion", "lr": 0.5})
    before = model.norm.weight.detach().clone()
    draw_grads(model.parameters(), 0)
    optimizer.step()
    # The first update of Lion is the sign of the gradient; weight decay is that of the optimizer.
    expected = before * (1 - 0.5 * 0.01) - 0.5 * model.norm.weight.grad.sign()
    torch.testing.assert_close(model.norm.weight.detach(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="expected all parameters before their exchange"):
        optimizer.add_param_group({"params": [model.down.weight]})


@on_ranks(2)
def test_step_may_be_compiled():
    """A compiled step has the bits of an eager one, the first step included."""
    # Other tests run without the compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    stepped = []
    for compile_step in (torch.compile, lambda step, **_: step):
        model = small_model(is_sharded=True)
        optimizer = MuonAdamW.from_model(model, lr=0.1)
        optimizer.step = compile_step(optimizer.step, backend="eager")
        for seed in range(2):
            step(model, optimizer, seed)
        stepped.append(copies(model, optimizer))
    assert equal(*stepped)


@on_ranks(2)
def test_parameters_may_become_shards_before_the_first_step():
    """Parameters may become shards until the first step, as under accelerate, and not later."""
    mesh = init_device_mesh(device().type, (torch.distributed.get_world_size(),))
    late, early = mixed_model(), mixed_model()
    optimizer = MuonAdamW.from_model(late, lr=0.1)
    # Nothing is planned by these while parameters are plain.
    optimizer.load_state_dict(optimizer.state_dict())
    names = [group["param_names"] for group in optimizer.param_groups]
    for model in (late, early):
        fully_shard(model, mesh=mesh)
    by_name = dict(late.named_parameters())
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [by_name[name] for name in of_group]
    reference = MuonAdamW.from_model(early, lr=0.1)
    for seed in range(NUM_STEPS):
        for run in ((late, optimizer), (early, reference)):
            step(*run, seed)
    # Entries of the plain parameters were left, and named nobody.
    assert len(optimizer.state_dict()["state"]) == len(list(late.parameters())) == 10
    for own, other in zip(late.parameters(), early.parameters(), strict=True):
        assert torch.equal(local(own), local(other))
    # And now they change, on one rank alone.
    if torch.distributed.get_rank() == 1:
        group = optimizer.param_groups[optimizer.algorithms.index("muon")]
        group["params"] = list(reversed(group["params"]))
    draw_grads(late.parameters(), 0)
    said = "rank 1: param_groups: expected the parameters, split_sizes"
    assert said in error_of(optimizer.step)
    for shape, said in (
        ((4, 4), "w: expected a DTensor in a job of 2 ranks"),
        ((4,), "w: expected a matrix"),
    ):
        param = torch.nn.Parameter(torch.ones(shape, device=device()))
        param.grad = torch.ones_like(param)
        assert said in error_of(MuonAdamW([{"params": [("w", param)], "algorithm": "muon"}]).step)


def test_summary_numbers_parameters_as_errors_do():
    """Parameters without names are numbered across groups, as in errors."""
    shapes = {"muon": (2, 2), "adamw": (3,)}
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(shape))], "algorithm": name}
        for name, shape in shapes.items()
    ]
    lines = MuonAdamW(groups).summary().splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        ["parameter 0", "(2, 2)", "muon"],
        ["parameter 1", "(3,)", "adamw"],
    ]
