# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What is read of a model of Megatron-FSDP v2, on stand-ins made with the installed release.

``GlobalLayout`` of megatron-core lays tensors out, and says what a rank holds. Its wrapper of later
releases has one axis; two axes, HSDP and HFSDP, show that nothing else is counted on.
"""

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import cached_cases
from helpers.sharded_muon import Optimizers, step_both, whole_matrix
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

pytestmark = pytest.mark.ranks

SHAPES = [(12, 6), (7, 4), (1, 4), (5, 12), (3,), (2, 6)]
# Whether each axis of the mesh shards rows; the others replicate.
MESHES = {
    "one_axis": ((4,), (True,)),
    "hsdp": ((2, 2), (False, True)),
    "hfsdp": ((2, 2), (True, True)),
}


def stand_in(name: str) -> tuple[list[Any], Any]:
    """Make sharded parameters as v2 holds them, and what it held them in; values count elements."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import layout, placement

    mesh_shape, is_shard = MESHES[name]
    mesh = init_device_mesh("cpu", mesh_shape)
    flat = layout.GlobalLayout.build(SHAPES, mesh.size())
    theirs = [placement.Flat() if shard else placement.Replicate() for shard in is_shard]
    shards = [Shard(0) if shard else Replicate() for shard in is_shard]
    start, size = flat.get_local_range(mesh, theirs)
    buffer = torch.arange(flat.size, dtype=torch.float32)[start : start + size]
    params, unsharded = [], []
    for shape, begin in zip(flat.tensor_shapes, flat.tensor_to_offset, strict=True):
        low, high = max(start, begin), min(start + size, begin + shape.numel())
        local = buffer[max(low - start, 0) : max(high - start, 0)] if low < high else buffer[:0]
        local, whole = local.view(-1, *shape[1:]), torch.empty(shape)
        dtensor = DTensor.from_local(
            local, mesh, shards, run_check=False, shape=shape, stride=whole.stride()
        )
        params.append(torch.nn.Parameter(dtensor))
        unsharded.append(torch.nn.Parameter(whole))
    group = type("Group", (), {})()
    group.sharded_parameters, group.unsharded_parameters = params, unsharded
    group.parameter_names = [f"tensor_{number}" for number in range(len(params))]
    group.main_weight = SimpleNamespace(layout=flat)
    for param in params:
        param._mfsdp_parameter_group = group
    return params, group


def _step(name: str) -> list[str]:
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, build_muon_step
    from megatron_muon.rows.parameters import PlannedParameter, tensor_shard_of

    params = []
    for param in stand_in(name)[0]:
        if param.dim() != 2:
            continue
        part = tensor_shard_of(PlannedParameter(str(param.shape), param, param))
        whole = torch.nn.Parameter(whole_matrix(param.shape, len(params), 0))
        param._local_tensor.data.copy_(whole.detach()[slice(*part.own_box[0])])
        # Halves that are orthogonalized apart: rows in another order would show.
        param.is_qkv = whole.is_qkv = param.shape[0] % 2 == 0
        param.qkv_split_shapes = whole.qkv_split_shapes = [param.shape[0] // 2] * 2
        params.append((param, whole, part))
    settings = {
        "lr": 0.5,
        "momentum": 0.9,
        "fp32_matmul_prec": "high",
        "num_ns_steps": 5,
        "split_qkv": True,
        "is_qkv_fn": lambda param: param.is_qkv,
    }
    shards = {param: part for param, _, part in params}
    muon = FSDPZeROTensorParallelMuon([*shards], tensor_shards=shards, **settings)
    muon.step = build_muon_step([muon]).step
    optimizers = Optimizers(muon, TensorParallelMuon([w for _, w, _ in params], **settings), params)
    step_both(optimizers, "fp32")
    return optimizers.differences()


def _copy_attributes() -> None:
    """Upstream's rules read them of what optimizers see, and v2 leaves them on the other one."""
    from megatron_muon.mcore.fsdp_model import copy_parameter_attributes

    (param, *_), group = stand_in("one_axis")
    unsharded = group.unsharded_parameters[0]
    unsharded.allreduce, unsharded.partition_dim, unsharded._private = False, 1, 1
    copy_parameter_attributes(param)
    assert not param.allreduce and param.partition_dim == 1
    assert not hasattr(param, "_private") and getattr(param, "__fsdp_param__", False)


def _cast() -> None:
    """bf16 gradients of fp32 weights; one that HSDP did not reduce would let replicas drift."""
    from megatron_muon.mcore.chunks import sharded_chunk

    (first, second, *_), group = stand_in("hsdp")
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


# A model's optimizer and chunk are its own.
STEPS = {name: functools.partial(_step, name) for name in MESHES}
results = cached_cases({4: {**STEPS, "attributes": _copy_attributes, "gradients": _cast}})


@pytest.mark.parametrize("name", MESHES)
def test_step_is_upstreams_on_whole_matrices(name):
    """Momentum, blocks and updates of uneven rows, with shards on one axis and on two."""
    assert results(4)[name] == [[]] * 4


@pytest.mark.parametrize("name", ["attributes", "gradients"])
def test_shards_have_attributes_of_megatron_and_gradients_in_fp32(name):
    """Gradients are cast, or refused if replicas differ."""
    assert results(4)[name] == [None] * 4
