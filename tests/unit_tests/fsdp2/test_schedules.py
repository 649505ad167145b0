# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch that change momentum too, beside torch's own optimizers."""

import copy
from typing import Any

import pytest
import torch
from helpers.fsdp2_models import mixed_model
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from megatron_muon.fsdp2 import MuonAdamW

NUM_STEPS = 6
SCHEDULES = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=NUM_STEPS + 1),
    "cyclic": lambda optimizer: CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2),
}


def _grads(params: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_changes_momentum_and_betas(name):
    """Torch looks for one of them in the defaults, and refused the optimizer, which has both."""
    model = mixed_model()
    theirs = copy.deepcopy(model)
    matrix, others = model["up"].weight, [model["norm"].weight, model["embed"].weight]
    copies = [theirs["norm"].weight, theirs["embed"].weight]
    ours = MuonAdamW([{"params": [matrix]}, {"params": others, "algorithm": "adamw"}], lr=0.1)
    assert "momentum" not in ours.param_groups[1]
    adamw = torch.optim.AdamW(copies, lr=0.1)
    # Its momentum is what that of Muon's group should be.
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    schedules = [SCHEDULES[name](each) for each in (ours, adamw, sgd)]
    for step in range(NUM_STEPS):
        _grads([*others, matrix], step)
        _grads(copies, step)
        for each in (ours, adamw, sgd):
            each.step()
        assert ours.param_groups[0]["momentum"] == sgd.param_groups[0]["momentum"]
        assert ours.param_groups[1]["betas"] == adamw.param_groups[0]["betas"]
        assert "betas" not in ours.param_groups[0]
        for schedule in schedules:
            schedule.step()
    assert all(map(torch.equal, others, copies))
    # A run that resumes goes on with the momentum of the checkpoint.
    last = ours.param_groups[1]["momentum"]
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert ours.param_groups[1]["momentum"] == last
