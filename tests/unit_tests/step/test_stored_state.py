# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Float32 copies that a step stores beside bfloat16 weights."""

from collections.abc import Callable

import pytest
import torch
from helpers.device import device
from helpers.fsdp2_models import drawn

from megatron_muon.fsdp2 import Muon

# The first step, and one after a load, need no call.
ANNOUNCEMENTS: dict[str, Callable[[Muon], None]] = {
    "construction": lambda _: None,
    "call": Muon.refresh_main_params,
    "load": lambda muon: muon.load_state_dict(muon.state_dict()),
    "removed state": lambda muon: muon.state.clear(),
}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _step_by_nothing(muon: Muon) -> None:
    """Step with a learning rate of 0, after which copies are as the step found them."""
    for group in muon.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    muon.step()


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("announcement", ANNOUNCEMENTS)
def test_changed_weight_counts_once_it_is_announced(announcement, is_refused):
    """Elements of an announced weight that differ from their rounded copy replace it."""
    param = torch.nn.Parameter(drawn((6, 9), 0).bfloat16().to(device()))
    muon = Muon([param], lr=1e-3)
    if announcement != "construction":
        param.grad = torch.ones_like(param)
        muon.step()
    main = muon.state[param]["main_param"].clone()
    ANNOUNCEMENTS[announcement](muon)
    if is_refused:
        param.grad = torch.full_like(param, torch.nan)
        with pytest.raises(RuntimeError, match="Nothing was updated"):
            muon.step()
    param.data[:, 0] = 2.0
    expected = param.float() if announcement == "removed state" else main.clone()
    expected[:, 0] = 2.0
    _step_by_nothing(muon)
    assert torch.equal(muon.state[param]["main_param"], expected)
    assert torch.equal(param, expected.bfloat16())
    # Without a word the copy is right, and the weight follows it.
    param.data[:, 1] = 3.0
    _step_by_nothing(muon)
    assert torch.equal(param, expected.bfloat16())


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
    mains = [muon.state[each]["main_param"] for each in (param, other)]
    for main in mains:
        # Less than half of a step of bfloat16.
        main.mul_(1 + 2.0**-12)
    old = [main.clone() for main in mains]
    with torch.no_grad():
        param.data[0] = torch.tensor([smallest, smallest, 2 * smallest, smallest, 0.0, -0.0])
        param.data[1, 2:] = torch.tensor([1.0, torch.nan, torch.inf, -1.0])
        param.data[2, 0].copy_(torch.nextafter(param.data[2, 0], param.data[2, 0] + 1))
        param.data[3].neg_()
        assert muon.muon.reserve() == []
    muon.muon.release()
    for main, before, own in zip(mains, old, (param, other), strict=True):
        expected = torch.where(before.to(own.dtype) == own, before, own)
        assert torch.equal(main.isnan(), expected.isnan())
        assert torch.equal(_bits(main.nan_to_num(7.0)), _bits(expected.nan_to_num(7.0)))
