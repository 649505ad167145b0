# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@pytest.mark.parametrize("optimizer_cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_initialization_of_states_leaves_parameters(optimizer_cls):
    """The step that makes optimizer states before a load does not decay the parameters."""
    weight = torch.nn.Parameter(torch.randn(4, 4))
    expected = weight.detach().clone()
    optimizer = optimizer_cls([weight], lr=0.1, weight_decay=0.5)

    DistributedOptimizer._init_optimizer_states_with_dummy_values(
        SimpleNamespace(optimizer=optimizer)
    )

    assert torch.equal(weight, expected)
    assert optimizer.param_groups[0]['lr'] == 0.1
    assert weight in optimizer.state or optimizer_cls is torch.optim.SGD
