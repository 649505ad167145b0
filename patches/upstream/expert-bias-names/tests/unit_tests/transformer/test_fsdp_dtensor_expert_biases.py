# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import pytest

from megatron.core import parallel_state
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    expert_param_local_key,
    handle_experts_in_state_dict,
)

NUM_EXPERTS, EP_SIZE = 4, 2
PREFIX = 'decoder.layers.0.mlp.experts.'


def names_on(ep_rank, names, monkeypatch):
    monkeypatch.setattr(parallel_state, 'get_expert_model_parallel_world_size', lambda: EP_SIZE)
    monkeypatch.setattr(parallel_state, 'get_expert_model_parallel_rank', lambda: ep_rank)
    return list(handle_experts_in_state_dict(dict.fromkeys(names), NUM_EXPERTS))


@pytest.mark.parametrize("kind", ['weight', 'bias'])
@pytest.mark.parametrize("suffix", ['', '_w', '_v'])
def test_grouped_experts_have_one_name_each(kind, suffix, monkeypatch):
    """Expert-parallel ranks save different experts under different names, biases included."""
    local = [f'{PREFIX}linear_fc1.{kind}{index}{suffix}' for index in range(2)]

    first, second = (names_on(rank, local, monkeypatch) for rank in range(EP_SIZE))

    assert first == local
    assert second == [f'{PREFIX}linear_fc1.{kind}{index}{suffix}' for index in (2, 3)]
    assert [expert_param_local_key(name, NUM_EXPERTS) for name in second] == local
