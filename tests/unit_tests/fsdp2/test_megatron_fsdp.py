# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""DTensors of the standalone Megatron-FSDP, whose uneven chunks follow from no rule."""

from typing import Any

import pytest
from helpers.device import device, init_group, kind
from helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _train(shapes: list[list[int]]) -> list[Any]:
    """Train three steps beside emerging-optimizers' Muon on the whole model."""
    import copy

    import torch
    import torch.distributed as dist
    from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
    from megatron.core.distributed.fsdp.src.megatron_fsdp import (
        fully_shard_model,
        fully_shard_optimizer,
    )
    from megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision import (
        MixedPrecisionPolicy,
    )
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        update_uneven_dtensor_chunk_metadata,
    )
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_muon.fsdp2 import ExchangeSettings, Muon

    init_group()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(cols, rows, bias=False) for rows, cols in shapes]
    whole = torch.nn.Sequential(*layers).to(device())
    # Without weight decay: fully_shard_optimizer() makes a step of its own, which would decay once.
    settings = {"lr": 0.1, "weight_decay": 0.0, "nesterov": True, "fp32_matmul_prec": "highest"}
    mesh = init_device_mesh(kind(), (dist.get_world_size(), 1), mesh_dim_names=("fsdp", "tp"))
    model = fully_shard_model(
        copy.deepcopy(whole),
        device_mesh=mesh,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Sequential],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    for param in model.parameters():
        update_uneven_dtensor_chunk_metadata(param)
    muon = Muon(model.named_parameters(), exchange=ExchangeSettings(wire="fp32"), **settings)
    muon = fully_shard_optimizer(muon)
    rows = [param._local_tensor.shape[0] for param in model.parameters()]
    reference = WholeMatrixMuon(whole.parameters(), **settings)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(4, shapes[0][1], device=device())
        muon.zero_grad()
        reference.zero_grad()
        pair = [model(batch).square().mean(), whole(batch).square().mean()]
        for loss in pair:
            loss.backward()
        muon.step()
        reference.step()
        losses.append([loss.item() for loss in pair])
    return [rows, losses]


SHAPES = [[10, 7], [5, 10], [9, 5]]


def test_uneven_chunks_train_like_the_whole_model():
    """Gradients are sums in another order, three steps long.

    Seen: equal losses. 1e-5 leaves room for CPUs that sum otherwise, and is far below what a wrong
    row does.
    """
    found = run_ranks(2, _train, SHAPES).check().results
    rows = [each[0] for each in found]
    assert [sum(each) for each in zip(*rows, strict=True)] == [each[0] for each in SHAPES]
    assert rows[0] != [-(-each[0] // 2) for each in SHAPES], "these are torch's own chunks"
    for ours, whole in found[0][1]:
        assert ours == pytest.approx(whole, rel=1e-5)
    assert found[0][1][-1][0] < 0.9 * found[0][1][0][0]
