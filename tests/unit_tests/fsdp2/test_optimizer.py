# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for FSDP2 among other optimizers: closures, schedulers, clipping, missing gradients."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from helpers.device import device, kind
from helpers.fsdp2_models import draw_grads, equal, local, shard, small_model
from helpers.ranks import on_ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW
from megatron_muon.runtime import row_moves

VALUES = torch.arange(12.0).view(3, 4)


def _pair(momentum_dtype: Any = torch.float32, **settings: Any) -> tuple[Any, Any, Any, Any]:
    """Return two equal parameters of one rank, and our Muon and the whole-matrix one over them."""
    ours, theirs = (torch.nn.Parameter(VALUES.to(device(), copy=True)) for _ in range(2))
    settings = {"lr": 0.1, "fp32_matmul_prec": "highest", **settings}
    exchange = ExchangeSettings(comm_dtype="fp32")
    muon = Muon([ours], exchange=exchange, momentum_dtype=momentum_dtype, **settings)
    return ours, theirs, muon, WholeMatrixMuon([theirs], **settings)


has_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason="from torch 2.10 on",
)
BF16 = pytest.param(torch.bfloat16, marks=has_grad_dtype)


@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": True},
        {"weight_decay_method": "l2", "weight_decay": 0.3},
        {"weight_decay_method": "l2", "weight_decay": 0.3, "nesterov": True},
        {"weight_decay_method": "palm", "weight_decay": 0.3},
        {"weight_decay_method": "independent", "weight_decay": 0.3},
        {"num_ns_steps": 3, "coefficient_type": "simple", "scale_mode": "shape_scaling"},
        {"momentum": 0.5, "extra_scale_factor": 0.2},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_single_rank_steps_like_emerging_optimizers(settings, dtype, momentum_dtype):
    """Three steps on one rank have the bits of emerging-optimizers for all settings and dtypes."""
    ours, theirs, muon, reference = _pair(momentum_dtype, **settings)
    if dtype == torch.bfloat16:
        ours.grad_dtype = dtype
    # l2 adds to the gradient, as emerging-optimizers does; nothing else changes it.
    is_changed = settings.get("weight_decay_method") == "l2" and dtype == torch.float32
    for step in range(3):
        torch.manual_seed(step)
        grad = torch.randn(3, 4, device=device()).to(dtype)
        ours.grad, theirs.grad = grad.clone(), grad.float().clone()
        muon.step()
        reference.step()
        momentum = reference.state[theirs]["momentum_buffer"]
        momentum.copy_(momentum.to(momentum_dtype))
        assert torch.equal(ours, theirs)
        assert torch.equal(muon.state[ours]["momentum_buffer"], momentum.to(momentum_dtype))
        assert torch.equal(ours.grad, theirs.grad if is_changed else grad)
        assert torch.equal(ours.grad, grad) != is_changed


def test_closure_computes_gradients_and_its_loss_is_returned():
    """A closure runs with gradients enabled, and the step returns its loss."""
    ours, theirs, muon, reference = _pair()

    def closure() -> Any:
        muon.zero_grad()
        loss = ours.square().sum()
        loss.backward()
        return loss

    assert muon.step(closure).item() == VALUES.square().sum().item()
    theirs.grad = (2 * theirs).detach()
    reference.step()
    assert torch.equal(ours, theirs)


def test_schedulers_and_clipping_work_as_with_any_optimizer():
    """Schedulers and clipping act on the step, which reads the learning rate anew."""
    ours, theirs, muon, reference = _pair()
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (muon, reference)]
    for step in range(3):
        torch.manual_seed(step)
        theirs.grad = 100 * torch.randn(3, 4, device=device())
        ours.grad = theirs.grad.clone()
        for param in (ours, theirs):
            torch.nn.utils.clip_grad_norm_([param], 1.0)
        muon.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert torch.equal(ours, theirs)
    assert muon.param_groups[0]["lr"] == 0.0125


@on_ranks(2)
def test_parameter_that_nobody_has_a_gradient_of_stays():
    """A parameter without a gradient on any rank stays, as in torch, and so does its momentum."""
    mesh = init_device_mesh(kind(), (2,))
    used, unused, frozen = (shard((5, 4), seed, mesh) for seed in range(3))
    alone = shard((5, 4), 0, mesh)
    muons = [Muon([each.param for each in (used, unused, frozen)]), Muon([alone.param])]
    frozen.param.requires_grad_(False)
    for step in range(2):
        for each in (used, alone):
            each.draw_grad(step)
        # In the second step it has momentum, which must stay too.
        unused.param.grad = None if step else used.param.grad
        tensors = (unused.param, muons[0].state[unused.param]["momentum_buffer"])
        before = [each.to_local().detach().clone() for each in tensors]
        for muon in muons:
            muon.step()
    assert all(torch.equal(own, each.to_local()) for own, each in zip(before, tensors, strict=True))
    assert before[1].abs().max() > 0
    assert torch.equal(frozen.param.to_local(), frozen.own(frozen.whole))
    assert torch.equal(used.param.to_local(), alone.param.to_local())


@on_ranks(4, timeout_s=60.0)
def test_ranks_may_have_no_matrices_or_list_them_in_any_order():
    """Ranks without matrices, or with another order of meshes, do not keep others waiting.

    The last two ranks have no matrices, with a limit of memory. Parameters of two meshes of the
    same ranks are listed in one order and in opposite orders.
    """
    rank = dist.get_rank()
    mesh = init_device_mesh(kind(), (4, 1), mesh_dim_names=("stage", "shard"))["shard"]
    model = torch.nn.Module()
    sharded = []
    if rank < 2:
        each = shard((4 + rank, 6), rank, mesh)
        model.weight = each.param
        each.draw_grad(9)
        sharded = [("weight", each.param)]
    muon = Muon(sharded, exchange=ExchangeSettings(staging_bytes=10**6))
    muon.step()
    # It makes a step of its own where an optimizer has no state.
    saved = get_optimizer_state_dict(model, muon)["state"]
    assert list(saved) == [name for name, _ in sharded]
    muon.load_state_dict(muon.state_dict())
    first = init_device_mesh(kind(), (2, 2), mesh_dim_names=("a", "s"))
    second = init_device_mesh(kind(), (2, 2), mesh_dim_names=("b", "t"))
    results = []
    for is_turned in (False, rank % 2 == 1):
        both = [shard((6, 5), 0, first["s"]), shard((4, 6), 1, second["b", "t"])]
        named = [(f"w{i}", each.param) for i, each in enumerate(both)]
        muon = Muon(named[::-1] if is_turned else named)
        for i, each in enumerate(both):
            each.draw_grad(10 + i)
        muon.step()
        results.append([each.param.to_local() for each in both])
    assert all(map(torch.equal, *results))


@on_ranks(2)
def test_batch_takes_as_many_calls_as_one_matrix():
    """A batch of 32 experts takes as many calls and host reads as one of 8."""
    from counting import OperationCounter

    # As on a GPU: a CPU moves rows without the kernel.
    if kind() == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        row_moves.uses_kernel = lambda device: True
    mesh = init_device_mesh(kind(), (2,))
    found = []
    for number in (2, 8, 32):
        batch = shard((number, 8, 6), 0, mesh)
        exchange = ExchangeSettings(cost_model="stack_tiles=1000")
        muon = Muon([batch.param], nesterov=True, weight_decay=0.1, exchange=exchange)
        batch.draw_grad(1)
        counter = OperationCounter()
        counter.count_row_kernel()
        with counter:
            muon.step()
        counts = counter.operations, counter.matrix_products, counter.host_reads
        found.append([each.total() for each in counts])
    one, few, many = found
    assert few == many
    assert many[1] == one[1] == 15
    assert many[0] <= one[0] + 2
    # Two numbers went to the device by a copy for which the host waits, and came back later.
    assert one[2] == many[2] == 1


@on_ranks(2)
def test_default_dtype_of_one_rank_changes_nothing():
    """Messages of torch's default dtype fit no other rank if one rank has changed the default."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(is_sharded=True)
        optimizer = MuonAdamW.from_model(model, lr=0.1, adaptive="normuon")
        for seed in range(2):
            draw_grads(model.parameters(), seed)
            torch.set_default_dtype(dtype if dist.get_rank() == 1 else torch.float32)
            optimizer.step()
            torch.set_default_dtype(torch.float32)
        found.append([local(param).detach().clone() for param in model.parameters()])
    assert equal(*found)
