# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import optim_state_to_sharding_state


def swiglu_factory(weight, tp_rank, tp_size):
    def build(key, data, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(
                key, half, (0, half_id * tp_size + tp_rank, 2 * tp_size), replica_id=replica_id
            )
            for half_id, half in enumerate(data.chunk(2))
        ]

    return ShardedTensorFactory('weight', weight, build, sum, replica_id=(0, 0, 1))


def sharded_state(tp_rank, tp_size, gated):
    """State of SOAP: one moment of the parameter's shape, and a factor for its rows."""
    weight = torch.randn(6, 4)
    if gated:
        model_param = swiglu_factory(weight, tp_rank, tp_size)
    else:
        model_param = ShardedTensor.from_rank_offsets(
            'weight', weight, (0, tp_rank, tp_size), replica_id=(0, 0, 1)
        )
    state = {'exp_avg': torch.zeros_like(weight), 'L': torch.eye(6)}
    optimizer = {'state': {0: state}, 'param_groups': [{'params': [0]}]}
    optim_state_to_sharding_state(optimizer, {0: model_param})
    return model_param, optimizer['state'][0]


@pytest.mark.parametrize("gated", [False, True])
def test_state_of_another_shape_than_its_parameter_is_sharded(gated):
    """The L of SOAP belongs to a shard of a weight, and has a key of its own for each shard."""
    (model_param, first), (_, second) = (sharded_state(rank, 2, gated) for rank in range(2))

    assert first['exp_avg'].key == second['exp_avg'].key == 'optimizer.state.exp_avg.weight'
    assert first['L'].key != second['L'].key
    for factor in (first['L'], second['L']):
        assert factor.local_shape == factor.global_shape == (6, 6)
        assert factor.replica_id == model_param.replica_id
