# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What is read of a model of Megatron-FSDP v2, on stand-ins made with the installed release.

``GlobalLayout`` of megatron-core lays tensors out, and says what a rank holds. Its wrapper of later
releases has one axis; two axes, HSDP and HFSDP, show that nothing else is counted on.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

SHAPES = [(12, 6), (7, 4), (1, 4), (5, 12), (3,), (2, 6)]
# Whether each axis of the mesh shards rows; the others replicate.
MESHES = {
    "one_axis": ((4,), (True,)),
    "hsdp": ((2, 2), (False, True)),
    "hfsdp": ((2, 2), (True, True)),
}


def stand_in(mesh_shape: tuple[int, ...], is_shard: tuple[bool, ...]) -> tuple[list[Any], Any]:
    """Make sharded parameters as v2 holds them, and what it held them in; values count elements."""
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import layout, placement
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", mesh_shape)
    flat = layout.GlobalLayout.build(SHAPES, mesh.size())
    theirs = [placement.Flat() if shard else placement.Replicate() for shard in is_shard]
    start, size = flat.get_local_range(mesh, theirs)
    buffer = torch.arange(flat.size, dtype=torch.float32)[start : start + size]
    params, unsharded = [], []
    for shape, begin in zip(flat.tensor_shapes, flat.tensor_to_offset, strict=True):
        low, high = max(start, begin), min(start + size, begin + shape.numel())
        local = buffer[max(low - start, 0) : max(high - start, 0)] if low < high else buffer[:0]
        whole = torch.empty(shape)
        shards = [Shard(0) if shard else Replicate() for shard in is_shard]
        local = local.view(-1, *shape[1:])
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


def _compare(name: str) -> list[Any]:
    import torch
    import torch.distributed as dist
    from helpers.device import init_group

    from megatron_muon.rows.megatron_fsdp import own_rows, tensor_shard_rows
    from megatron_muon.rows.parameters import PlannedParameter, replicas_of, tensor_shard_of
    from megatron_muon.runtime.exchange import all_gather_rows

    init_group()
    params, group = stand_in(*MESHES[name])
    matrices = {i: param for i, param in enumerate(params) if param.dim() == 2}
    wrong, num_shards, num_replicas = [], set(), set()
    for i, param in matrices.items():
        part = tensor_shard_of(PlannedParameter(str(i), param, param))
        begin = group.main_weight.layout.tensor_to_offset[i]
        whole = begin + torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
        start, stop = part.own_box[0]
        if not torch.equal(param._local_tensor, whole[start:stop]):
            wrong.append(f"{i}: rows {start} to {stop}")
        if own_rows(param) != (start, stop):
            wrong.append(f"{i}: local rows")
        replicas = replicas_of(param.device_mesh, tuple(param.placements))
        # One rank of each set of replicas: the ranks that hold all rows together.
        if len(replicas) == dist.get_world_size():
            gathered = all_gather_rows(param.to_local(), tensor_shard_rows(param), dist.group.WORLD)
            if not torch.equal(gathered, whole):
                wrong.append(f"{i}: gathered")
        num_shards.add(len(replicas))
        num_replicas.update(map(len, replicas))
    return [wrong, list(num_shards), list(num_replicas)]


@pytest.mark.parametrize("name", MESHES)
def test_rows_are_where_the_layout_put_them(name):
    """Local rows and the gathered matrix, on one axis and on two, shards and replicas."""
    run = run_ranks(4, _compare, name).check()
    num_shards, num_replicas = (2, 2) if name == "hsdp" else (4, 1)
    assert run.results == [[[], [num_shards], [num_replicas]]] * 4


def _step(name: str) -> bool:
    import torch
    from helpers.device import init_group
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, build_muon_step
    from megatron_muon.rows.parameters import PlannedParameter, tensor_shard_of

    init_group()
    params = [param for param in stand_in(*MESHES[name])[0] if param.dim() == 2]
    parts = {p: tensor_shard_of(PlannedParameter(str(i), p, p)) for i, p in enumerate(params)}
    settings = {"lr": 0.5, "momentum": 0.9, "fp32_matmul_prec": "high", "num_ns_steps": 5}
    wholes = []
    for param, part in parts.items():
        torch.manual_seed(len(wholes))
        # Halves that are orthogonalized apart: rows in another order would show.
        weight, grad = torch.randn(2, *param.shape).unbind()
        start, stop = part.own_box[0]
        param._local_tensor.data.copy_(weight[start:stop])
        param.grad = torch.zeros_like(param)
        param.grad._local_tensor.copy_(grad[start:stop])
        whole = torch.nn.Parameter(weight)
        whole.grad = grad
        if param.shape[0] % 2 == 0:
            for each in (param, whole):
                each.is_qkv, each.qkv_split_shapes = True, [param.shape[0] // 2] * 2
        wholes.append(whole)
    is_split = {
        "split_qkv": True,
        "is_qkv_fn": lambda param: getattr(param, "is_qkv", False),
        "qkv_split_shapes": (1, 1),
    }
    # Upstream reads the sizes of blocks from the optimizer, so that each has one of its own.
    for whole in wholes:
        shapes = tuple(getattr(whole, "qkv_split_shapes", (1, 1)))
        TensorParallelMuon([whole], **settings, **{**is_split, "qkv_split_shapes": shapes}).step()
    build_muon_step(
        [FSDPZeROTensorParallelMuon(params, tensor_shards=parts, **settings, **is_split)]
    ).step()
    return all(
        torch.equal(param._local_tensor, whole[slice(*parts[param].own_box[0])])
        for param, whole in zip(params, wholes, strict=True)
    )


@pytest.mark.parametrize("name", MESHES)
def test_step_is_upstreams_on_whole_matrices(name):
    """Momentum, blocks and updates of uneven rows, with shards on one axis and on two."""
    assert run_ranks(4, _step, name).check().results == [True] * 4


def _copy_attributes() -> list[Any]:
    from helpers.device import init_group

    from megatron_muon.mcore.fsdp_model import copy_parameter_attributes

    init_group()
    params, group = stand_in(*MESHES["one_axis"])
    group.unsharded_parameters[0].allreduce = False
    group.unsharded_parameters[0].partition_dim = 1
    group.unsharded_parameters[0]._private = 1
    copy_parameter_attributes(params[0])
    return [
        params[0].allreduce,
        params[0].partition_dim,
        hasattr(params[0], "_private"),
        getattr(params[0], "__fsdp_param__", False),
    ]


def test_attributes_of_megatron_are_copied_to_shards():
    """Upstream's rules read them of what optimizers see, and v2 leaves them on the other one."""
    assert run_ranks(4, _copy_attributes).check().results == [[False, 1, False, True]] * 4


def _cast() -> list[Any]:
    import torch
    from helpers.device import init_group
    from torch.distributed.tensor import DTensor, Partial

    from megatron_muon.mcore.chunks import sharded_chunk

    init_group()
    params, group = stand_in(*MESHES["hsdp"])
    synced: list[int] = []
    group.sync_model_weight_from_main_weight = lambda: synced.append(1)
    model = torch.nn.Module()
    model.first, model.second, model.config = params[0], params[1], None
    chunk = sharded_chunk(model)
    for param, placement in ((params[0], params[0].placements[0]), (params[1], Partial("sum"))):
        local = param._local_tensor.detach().to(torch.bfloat16)
        param.grad_dtype = torch.bfloat16
        param.grad = DTensor.from_local(
            local,
            param.device_mesh,
            [placement, param.placements[1]],
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    problems = chunk.finish_gradients()
    dtypes = [str(params[0].grad.dtype)]
    chunk.end()
    dtypes.append(str(params[0].grad.dtype))
    chunk.install_weights()
    chunk.zero_gradients()
    return [problems, dtypes, len(synced), params[0].grad is None]


def test_gradients_are_cast_for_a_step_and_refused_where_replicas_have_others():
    """bf16 gradients of fp32 weights; one that HSDP did not reduce would let replicas drift."""
    problems, dtypes, num_synced, is_dropped = run_ranks(4, _cast).check().results[0]
    assert len(problems) == 1 and problems[0].startswith("second: expected a gradient with placem")
    assert dtypes == ["torch.float32", "torch.bfloat16"]
    assert num_synced == 1 and is_dropped
