# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.emerging_optimizers import (
    _EMERGING_OPTIMIZERS,
    HAVE_EMERGING_OPTIMIZERS,
    _create_emerging_optimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig

pytestmark = pytest.mark.skipif(
    not HAVE_EMERGING_OPTIMIZERS, reason="emerging_optimizers is not installed"
)


@pytest.mark.parametrize("name", sorted(_EMERGING_OPTIMIZERS))
def test_registered_optimizer_can_be_created(name):
    """Optimizers of the registry are created with the arguments that they have."""
    config = OptimizerConfig(optimizer=name, lr=0.01, adam_beta1=0.8, adam_beta2=0.7)
    model_config = SimpleNamespace(num_attention_heads=2, num_query_groups=2, kv_channels=4)
    # Doubly stochastic, as sinkhorn_muon requires.
    weight = torch.nn.Parameter(torch.full((8, 8), 1 / 8))

    optimizer, _ = _create_emerging_optimizer(
        config, [{'params': [weight]}], name, [SimpleNamespace(config=model_config)], None
    )

    assert optimizer.param_groups[0].get('betas', (0.8, 0.7)) == (0.8, 0.7)
