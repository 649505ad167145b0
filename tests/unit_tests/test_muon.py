# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""FSDPZeROTensorParallelMuon on hand-made row shards, against upstream's Muon on whole matrices."""

import dataclasses
from itertools import accumulate
from typing import Any

import pytest
from ranks import run_ranks

# Rows of each rank, for (rows, cols); tall, wide and square, uneven, empty and one-row shards.
LAYOUTS: dict[int, list[tuple[int, list[int]]]] = {
    1: [(24, [48]), (48, [24]), (32, [32])],
    2: [(24, [31, 17]), (48, [24, 0]), (32, [1, 31]), (8, [16, 16])],
    3: [(24, [0, 47, 1]), (48, [8, 8, 8]), (32, [0, 0, 32]), (8, [5, 1, 2])],
    4: [(24, [1, 0, 46, 1]), (48, [7, 5, 0, 12]), (32, [8, 8, 8, 8]), (20, [3, 0, 0, 1])],
}
# Two query groups of 4 + 2 + 2 rows a head dimension of 4: borders at rows 8, 12, 16, 24, ...
QKV_SPLIT = [8, 4, 4]
QKV_ROWS = {1: [32], 2: [7, 25], 3: [0, 9, 23], 4: [1, 10, 0, 21]}

SETTINGS = [
    {},
    {"nesterov": False, "momentum": 0.8},
    {"fp32_matmul_prec": "highest", "coefficient_type": "polar_express", "num_ns_steps": 3},
    {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.2, "weight_decay": 0.0},
    {"use_decoupled_weight_decay": False, "coefficient_type": "simple"},
    {"split_qkv": False, "scale_mode": "shape_scaling"},
]
NUM_STEPS = 3


def _init_group() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.group.WORLD


def _whole(shape: tuple[int, int], seed: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _build(
    world: int, settings: dict[str, Any]
) -> tuple[Any, Any, list[Any], list[Any], list[Any]]:
    """Make the sharded and the whole optimizer over the same parameters."""
    import torch
    import torch.distributed as dist
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from megatron_muon.layout import RowLayout
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, ShardedMatrix

    group, rank = dist.group.WORLD, dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    cases = [*LAYOUTS[world], (24, QKV_ROWS[world])]
    sharded, whole, matrices = [], [], {}
    for index, (cols, rows) in enumerate(cases):
        stops = list(accumulate(rows))
        layout = RowLayout(sum(rows), cols, tuple(zip([0, *stops], stops, strict=False)))
        start, stop = layout.shards[rank]
        value = _whole((sum(rows), cols), index)
        reference = torch.nn.Parameter(value.clone())
        param = torch.nn.Parameter(
            DTensor.from_local(
                value[start:stop].clone(),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        )
        for each in (param, reference):
            each.is_qkv = index == len(cases) - 1
        sharded.append(param)
        whole.append(reference)
        matrices[param] = ShardedMatrix(f"layer.{index}.weight", layout, group)
    arguments = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "nesterov": True,
        "split_qkv": True,
        "is_qkv_fn": lambda param: param.is_qkv,
        "qkv_split_shapes": QKV_SPLIT,
        **settings,
    }
    optimizer = FSDPZeROTensorParallelMuon(sharded, matrices=matrices, **arguments)
    return (
        optimizer,
        TensorParallelMuon(whole, **arguments),
        sharded,
        whole,
        list(matrices.values()),
    )


def _set_gradients(sharded: list[Any], whole: list[Any], matrices: list[Any], step: int) -> None:
    from megatron_muon.mcore.muon import _with_local

    for index, (param, reference, matrix) in enumerate(zip(sharded, whole, matrices, strict=True)):
        grad = _whole(reference.shape, 1000 * step + index)
        start, stop = matrix.local_range
        reference.grad = grad.clone()
        # As Megatron-FSDP attaches gradients: none where the shard is empty.
        param.grad = _with_local(param, grad[start:stop].clone()) if stop > start else None


def _step_and_compare(world: int) -> list[str]:
    import torch

    _init_group()
    different = []
    for settings in SETTINGS:
        optimizer, reference_optimizer, sharded, whole, matrices = _build(world, settings)
        for step in range(NUM_STEPS):
            _set_gradients(sharded, whole, matrices, step)
            optimizer.step()
            reference_optimizer.step()
        for param, reference, matrix in zip(sharded, whole, matrices, strict=True):
            start, stop = matrix.local_range
            momentum = reference_optimizer.state[reference]["momentum_buffer"][start:stop]
            if not torch.equal(param._local_tensor, reference[start:stop]):
                different.append(f"{settings} {matrix.fqn}: parameter")
            if not torch.equal(optimizer.state[param]["momentum_buffer"]._local_tensor, momentum):
                different.append(f"{settings} {matrix.fqn}: momentum")
    return different


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_step_equals_upstream_muon_on_whole_matrices(world_size):
    """Parameters and momentum are bit-identical after three steps, for every layout and setting."""
    run = run_ranks(world_size, _step_and_compare, world_size).check()
    assert run.results == [[]] * world_size


def _forget_a_gradient() -> str:
    import torch
    import torch.distributed as dist

    _init_group()
    optimizer, _, sharded, whole, matrices = _build(3, {})
    before = [param._local_tensor.clone() for param in sharded]
    _set_gradients(sharded, whole, matrices, 0)
    if dist.get_rank() == 1:
        sharded[0].grad = None
    try:
        optimizer.step()
    except RuntimeError as error:
        state = optimizer.state
        assert all(map(torch.equal, before, [param._local_tensor for param in sharded]))
        assert not any(state[p]["momentum_buffer"]._local_tensor.any() for p in sharded)
        return str(error)
    return "no error"


def test_step_with_a_missing_gradient_raises_on_all_ranks_and_changes_nothing():
    """One rank without a gradient on a non-empty shard stops all ranks, naming both."""
    run = run_ranks(3, _forget_a_gradient).check()
    assert len(set(run.results)) == 1
    assert (
        "rank 1: layer.0.weight: expected a gradient on a shard of shape (47, 24)" in run.results[0]
    )
    assert "Nothing was updated" in run.results[0]


def _state_of_every_parameter() -> list[tuple[int, int]]:
    from torch.distributed.tensor import DTensor

    _init_group()
    optimizer, _, sharded, _, _ = _build(4, {})
    buffers = [optimizer.state[param]["momentum_buffer"] for param in sharded]
    assert all(isinstance(buffer, DTensor) for buffer in buffers)
    assert all(
        buffer.placements == p.placements for buffer, p in zip(buffers, sharded, strict=True)
    )
    return [tuple(buffer._local_tensor.shape) for buffer in buffers]


def test_momentum_exists_for_every_parameter_from_construction():
    """Empty shards have momentum too: ranks with different sets of state hang the save."""
    run = run_ranks(4, _state_of_every_parameter).check()
    for rank, shapes in enumerate(run.results):
        expected = [[rows[rank], cols] for cols, rows in LAYOUTS[4]] + [[QKV_ROWS[4][rank], 24]]
        assert shapes == expected


def _disagree_about_a_layout() -> str:
    import torch.distributed as dist

    from megatron_muon.layout import RowLayout
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    _init_group()
    _, _, sharded, _, matrices = _build(2, {})
    if dist.get_rank() == 1:
        matrices[2] = dataclasses.replace(matrices[2], fqn="layer.two.weight")
    try:
        FSDPZeROTensorParallelMuon(sharded, matrices=dict(zip(sharded, matrices, strict=True)))
    except RuntimeError as error:
        if dist.get_rank() == 1:
            bad = RowLayout(48, 24, ((0, 17), (17, 48)))
            matrices[0] = dataclasses.replace(matrices[0], layout=bad)
        try:
            FSDPZeROTensorParallelMuon(sharded, matrices=dict(zip(sharded, matrices, strict=True)))
        except RuntimeError as shape_error:
            return f"{error} | {shape_error}"
    return "no error"


def test_ranks_that_disagree_raise_at_construction_on_all_ranks():
    """A parameter that is another one on some rank is named before anything is exchanged."""
    run = run_ranks(2, _disagree_about_a_layout).check()
    for text in run.results:
        assert "rank 1 has 'layer.two.weight" in text
        assert "rank 1: layer.0.weight: expected a local shard of shape (31, 24)" in text


def test_unknown_exchange_is_refused():
    """The exchange is checked before anything else, and the flag is named."""
    run = run_ranks(1, _unknown_exchange).check()
    assert "expected one of ('all_gather',), got 'owner'" in run.results[0]
    assert "--muon-fsdp-exchange" in run.results[0]


def _unknown_exchange() -> str:
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    try:
        FSDPZeROTensorParallelMuon([], matrices={}, exchange="owner")
    except ValueError as error:
        return str(error)
    return "no error"
