# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What mcore reads and sets of a model of Megatron-FSDP v2; rows/ has its rows on any mesh."""

from typing import Any
from unittest import mock

import pytest
import torch
from helpers.megatron_fsdp import ShardedNet
from helpers.ranks import cached_cases
from torch.distributed.tensor import DTensor, Partial

pytestmark = pytest.mark.ranks


def _sharded(layout: str) -> tuple[list[Any], Any]:
    """Return two sharded matrices and what holds them."""
    net = ShardedNet(layout, [(12, 6), (7, 4)], has_bias=False)
    params = list(net.matrices.values())
    return params, params[0]._mfsdp_parameter_group


def _copy_attributes() -> None:
    """Upstream's rules read them of what optimizers see, and v2 leaves them on the other one."""
    from megatron_muon.mcore.fsdp_model import copy_parameter_attributes

    (param, *_), group = _sharded("zero3")
    unsharded = group.unsharded_parameters[0]
    unsharded.allreduce, unsharded.partition_dim, unsharded._private = False, 1, 1
    copy_parameter_attributes(param)
    assert not param.allreduce and param.partition_dim == 1
    assert not hasattr(param, "_private") and getattr(param, "__fsdp_param__", False)


def _cast() -> None:
    """bf16 gradients of fp32 weights; one that HSDP did not reduce would let replicas drift."""
    from megatron_muon.mcore.chunks import sharded_chunk

    (first, second), group = _sharded("hsdp")
    group.sync_model_weight_from_main_weight = mock.Mock()
    model = torch.nn.Module()
    model.first, model.second, model.config = first, second, None
    chunk = sharded_chunk(model)
    for param, placement in ((first, first.placements[0]), (second, Partial("sum"))):
        param.grad_dtype = torch.bfloat16
        param.grad = DTensor.from_local(
            param._local_tensor.detach().to(torch.bfloat16),
            param.device_mesh,
            [placement, param.placements[1]],
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    (problem,) = chunk.finish_gradients()
    assert problem.startswith("second: expected a gradient with placem")
    assert first.grad.dtype == torch.float32
    # The next backward pass attaches gradients of the old dtype.
    first.grad = first.grad.to(torch.bfloat16)
    chunk.install_weights()
    assert group.sync_model_weight_from_main_weight.call_count == 1
    chunk.zero_gradients()
    assert first.grad is None


results = cached_cases({4: {"attributes": _copy_attributes, "gradients": _cast}})


@pytest.mark.parametrize("name", ["attributes", "gradients"])
def test_shards_have_attributes_of_megatron_and_gradients_in_fp32(name):
    """Shards get Megatron's attributes; gradients are cast, or refused if replicas differ."""
    assert results(4)[name] == [None] * 4
