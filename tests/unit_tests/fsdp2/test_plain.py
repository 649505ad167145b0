# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plain tensors and convolutions, beside whole matrices."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.device import device, init_group
from helpers.fsdp2_models import drawn
from helpers.ranks import run_ranks

from megatron_muon.fsdp2 import ExchangeSettings, Muon

NUM_STEPS = 3
MUON = {"lr": 0.02, "weight_decay": 0.1, "nesterov": True}
COMM_DTYPES = (("fp32", "high"), ("bf16", "medium"))


def _reference(shapes: Sequence[Sequence[int]], comm_dtype: str, precision: str) -> tuple[Any, Any]:
    """Return whole parameters, and a function that steps them with emerging-optimizers' Muon."""
    from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
    from helpers.whole_matrices import float64_normalize

    params = [torch.nn.Parameter(drawn(shape, number)) for number, shape in enumerate(shapes)]
    matrices = [torch.nn.Parameter(param.detach().flatten(1).clone()) for param in params]
    muon = WholeMatrixMuon(matrices, fp32_matmul_prec=precision, **MUON)

    def step(number: int) -> list[Any]:
        grads = [drawn(shape, 100 * number + i) for i, shape in enumerate(shapes)]
        for matrix, grad in zip(matrices, grads, strict=True):
            matrix.grad = grad.flatten(1).clone()
        norm: Any = nullcontext()
        if comm_dtype == "bf16":
            norm = mock.patch("torch.nn.functional.normalize", float64_normalize)
        with norm:
            muon.step()
        for param, matrix in zip(params, matrices, strict=True):
            param.data.copy_(matrix.data.view_as(param))
        return grads

    step.momentum = lambda i: muon.state[matrices[i]]["momentum_buffer"].view_as(params[i])  # type: ignore[attr-defined]
    return params, step


# Shape of the whole, dimension that is cut (None for none), rows of each block.
BLOCKS: list[tuple[tuple[int, int], int | None, list[int]]] = [
    ((12, 8), 0, [6, 6]),
    ((8, 12), 1, [6, 6]),
    ((11, 8), 0, [8, 3]),
    ((8, 9), 1, [1, 8]),
    ((5, 7), 0, [5, 0]),
    ((6, 10), None, []),
]


def _plain_groups(num_replicas: int, num_blocks: int) -> tuple[Any, Any, int]:
    """Return the groups of copies and of blocks, and this rank's block."""
    import torch.distributed as dist

    rank = dist.get_rank()
    rows = [list(range(d * num_blocks, (d + 1) * num_blocks)) for d in range(num_replicas)]
    tensor_groups = [dist.new_group(row) for row in rows]
    data_groups = [dist.new_group(list(column)) for column in zip(*rows, strict=True)]
    return (
        data_groups[rank % num_blocks] if num_replicas > 1 else None,
        tensor_groups[rank // num_blocks] if num_blocks > 1 else None,
        rank % num_blocks,
    )


def _cut(whole: Any, dim: int | None, sizes: list[int], block: int) -> Any:
    if dim is None:
        return whole.clone()
    return whole.split(sizes, dim)[block].clone()


def _step_plain(num_replicas: int, num_blocks: int) -> list[str]:
    """Step plain tensors on a grid of ranks; list what differs from whole matrices."""
    init_group()
    process_group, tensor_group, block = _plain_groups(num_replicas, num_blocks)
    different = []
    for comm_dtype, precision in COMM_DTYPES:
        blocks = BLOCKS if num_blocks > 1 else [(shape, None, []) for shape, _, _ in BLOCKS]
        wholes, step_whole = _reference([shape for shape, _, _ in blocks], comm_dtype, precision)
        params = []
        for whole, (_, dim, sizes) in zip(wholes, blocks, strict=True):
            param = torch.nn.Parameter(_cut(whole.detach(), dim, sizes, block))
            if dim is not None:
                param.partition_dim = dim
            params.append(param)
        muon = Muon(
            [(f"weight.{i}", param) for i, param in enumerate(params)],
            exchange=ExchangeSettings(comm_dtype=comm_dtype, max_owners=1),
            fp32_matmul_prec=precision,
            process_group=process_group,
            tensor_group=tensor_group,
            **MUON,
        )
        for number in range(NUM_STEPS):
            grads = step_whole(number)
            for param, grad, (_, dim, sizes) in zip(params, grads, blocks, strict=True):
                param.grad = _cut(grad, dim, sizes, block)
            muon.step()
        for i, (param, (_, dim, sizes)) in enumerate(zip(params, blocks, strict=True)):
            momentum = muon.state[param]["momentum_buffer"]
            assert type(momentum) is torch.Tensor
            for what, ours, whole in (
                ("value", param, wholes[i]),
                ("momentum", momentum, step_whole.momentum(i)),
            ):
                if not torch.equal(ours, _cut(whole, dim, sizes, block)):
                    different.append(f"{comm_dtype}: weight.{i}, {what}")
    # Each matrix once, on one rank.
    owners = [ranks for plan in muon.compute.plans for ranks in plan.owners]
    assert len(owners) == len(params) and all(len(ranks) == 1 for ranks in owners)
    return different


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_replicas", "num_blocks"), [(2, 1), (1, 2), (2, 2)], ids=["ddp", "tp", "ddp-tp"]
)
def test_plain_tensors_step_as_whole_matrices_do(num_replicas, num_blocks):
    """Replicas of DDP, blocks of Transformer Engine, even, uneven and empty, and both."""
    run = run_ranks(num_replicas * num_blocks, _step_plain, num_replicas, num_blocks)
    for different in run.check().results:
        assert different == []


def _refusals() -> dict[str, str]:
    """Return what is said of plain tensors that cannot be stepped."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_group()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    world = dist.group.WORLD

    def plain(**marks: Any) -> Any:
        param = torch.nn.Parameter(torch.ones(4, 4, device=device()))
        for name, value in marks.items():
            setattr(param, name, value)
        return param

    mesh = init_device_mesh(device().type, (2,))
    sharded = torch.nn.Parameter(
        distribute_tensor(torch.ones(4, 4, device=device()), mesh, [Shard(0)])
    )
    channels_last = torch.nn.Parameter(
        torch.ones(4, 3, 2, 2, device=device()).to(memory_format=torch.channels_last)
    )
    # This rank's row is the job, and its column too: no grid.
    cases: dict[str, Callable[[], Any]] = {
        "no_group": lambda: Muon([("w", plain())]),
        "no_blocks": lambda: Muon([("w", plain(partition_dim=0))], process_group=world),
        "mixed": lambda: Muon([("w", plain()), ("v", sharded)], process_group=world),
        "grid": lambda: Muon([("w", plain())], process_group=world, tensor_group=world),
        "one_rank": lambda: Muon(
            [("w", plain())], process_group=world if dist.get_rank() == 0 else None
        ),
        "stride": lambda: Muon(
            [{"params": [("w", plain(partition_dim=0, partition_stride=2))], "split_sizes": 2}],
            tensor_group=world,
        ),
        "flatten": lambda: Muon(
            [{"params": [("w", channels_last)], "flatten": True}], process_group=world
        ),
        "no_flatten": lambda: Muon([("w", channels_last)], process_group=world),
        "not_bool": lambda: Muon([{"params": [("v", sharded)], "flatten": 1}]),
        "function": lambda: Muon([("v", sharded)], newton_schulz="fast"),
        "function_dtype": lambda: Muon(
            [("v", sharded)],
            newton_schulz=torch.clone,
            exchange=ExchangeSettings(comm_dtype="bf16"),
        ),
        "function_form": lambda: Muon(
            [("v", sharded)],
            newton_schulz=torch.clone,
            exchange=ExchangeSettings(newton_schulz="gram"),
        ),
        "momentum": lambda: Muon([("v", sharded)], momentum_dtype=torch.float16),
    }
    assert alone is not None
    said = {}
    for name, build in cases.items():
        try:
            build()
            said[name] = "no error"
        except RuntimeError as error:
            said[name] = str(error)
    return said


@pytest.mark.ranks
def test_plain_tensors_that_cannot_be_stepped_are_refused_on_all_ranks():
    """Never a silent WORLD: a sentence each."""
    expected = {
        "no_group": "w: expected a DTensor in a job of 2 ranks, got a plain tensor",
        "no_blocks": "w: expected tensor_group with a partition_dim of 0, got none",
        "mixed": "v: expected plain tensors with process_group or tensor_group, got a DTensor",
        "grid": "process_group, tensor_group: expected ranks in a grid",
        "one_rank": "rank 0: process_group, tensor_group: expected ranks in a grid",
        "stride": "w: split_sizes: expected none with a partition_stride of 2",
        "flatten": "w: flatten: expected a contiguous tensor",
        "no_flatten": "set flatten=True in the group of a convolution",
        "not_bool": "v: flatten: expected True or False, got 1",
        "function": "newton_schulz: expected a function of a stack, got 'fast'",
        "function_dtype": "exchange.comm_dtype: expected fp32 for Newton-Schulz in fp32",
        "function_form": "newton_schulz: expected a function of a stack",
        "momentum": "momentum_dtype: expected one of [torch.float32, torch.bfloat16]",
    }
    for said in run_ranks(2, _refusals).check().results:
        assert set(said) == set(expected)
        for name, text in expected.items():
            assert text in said[name], said[name]


CONVOLUTIONS = [(8, 3, 2, 2), (5, 4, 3), (6, 2, 2, 2, 2), (1, 6, 1, 2), (9, 7)]


def _step_convolutions() -> list[str]:
    """Step sharded convolutions, and whole ones as matrices of output channels."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    init_group()
    mesh = init_device_mesh(device().type, (torch.distributed.get_world_size(),))
    different = []
    for comm_dtype, precision in COMM_DTYPES:
        wholes, step_whole = _reference(CONVOLUTIONS, comm_dtype, precision)

        class Model(torch.nn.Module):
            """Holds them."""

        model = Model()
        model.forward = lambda: None  # type: ignore[assignment]
        for i, whole in enumerate(wholes):
            setattr(model, f"weight{i}", torch.nn.Parameter(whole.detach().clone()))
        fully_shard(model, mesh=mesh)
        muon = Muon(
            [{"params": list(model.named_parameters()), "flatten": True}],
            exchange=ExchangeSettings(comm_dtype=comm_dtype, max_owners=1),
            fp32_matmul_prec=precision,
            **MUON,
        )
        for number in range(NUM_STEPS):
            for param, grad in zip(model.parameters(), step_whole(number), strict=True):
                from torch.distributed.tensor import distribute_tensor

                param.grad = distribute_tensor(grad, mesh, param.placements)
            muon.step()
        for i, param in enumerate(model.parameters()):
            for what, ours, whole in (
                ("value", param, wholes[i]),
                ("momentum", muon.state[param]["momentum_buffer"], step_whole.momentum(i)),
            ):
                if not torch.equal(ours.full_tensor(), whole):
                    different.append(f"{comm_dtype}: weight{i}, {what}")
    return different


@pytest.mark.ranks
def test_convolutions_step_as_matrices_of_output_channels():
    """Uneven and empty shards too."""
    for different in run_ranks(3, _step_convolutions).check().results:
        assert different == []
