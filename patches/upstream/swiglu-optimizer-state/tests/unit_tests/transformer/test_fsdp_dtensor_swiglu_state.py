# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer import fsdp_dtensor_checkpoint

KEY = 'module.decoder.layers.0.mlp.linear_fc1.weight'


class Shard(torch.Tensor):
    """Stands for a DTensor of one rank, which needs no process group."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("names", [['exp_avg', 'exp_avg_sq'], ['momentum_buffer'], []])
def test_swiglu_splits_the_states_of_any_optimizer(names, monkeypatch):
    """States are split by what they are, not by Adam's names: SGD has others, or none."""
    monkeypatch.setattr(
        fsdp_dtensor_checkpoint, 'make_fsdp_dtensor', lambda local, meta, **kwargs: local
    )
    weight = torch.nn.Parameter(torch.randn(6, 4))
    weight.megatron_fsdp_slice = slice(0, weight.numel())
    weight.megatron_fsdp_dist_index = SimpleNamespace(
        tp_dim='tp', get_submesh=lambda *_, **kwargs: SimpleNamespace(mesh=torch.zeros(1))
    )
    model = torch.nn.Module()
    model.config = SimpleNamespace(num_moe_experts=None)
    model.get_parameter = lambda name: weight
    state = {name: torch.randn(6, 4).as_subclass(Shard) for name in names}
    optimizer = {'state': {KEY: {'step': torch.tensor(3.0), **state}}}

    _, split = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(model, {}, optimizer)

    assert list(split['state']) == [f'{KEY}_w', f'{KEY}_v']
    for half, part in enumerate(split['state'].values()):
        assert part['step'] == 3
        for name in names:
            assert torch.equal(part[name], state[name].to_local().chunk(2)[half])
