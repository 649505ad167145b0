# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plain tensors, convolutions, own functions and momentum in bfloat16, beside whole matrices."""

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
WIRES = (("fp32", "high"), ("bf16", "medium"))


def _reference(shapes: Sequence[Sequence[int]], wire: str, precision: str) -> tuple[Any, Any]:
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
        if wire == "bf16":
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
    for wire, precision in WIRES:
        blocks = BLOCKS if num_blocks > 1 else [(shape, None, []) for shape, _, _ in BLOCKS]
        wholes, step_whole = _reference([shape for shape, _, _ in blocks], wire, precision)
        params = []
        for whole, (_, dim, sizes) in zip(wholes, blocks, strict=True):
            param = torch.nn.Parameter(_cut(whole.detach(), dim, sizes, block))
            if dim is not None:
                param.partition_dim = dim
            params.append(param)
        muon = Muon(
            [(f"weight.{i}", param) for i, param in enumerate(params)],
            exchange=ExchangeSettings(wire=wire, max_parts=1),
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
                    different.append(f"{wire}: weight.{i}, {what}")
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
        "function_wire": lambda: Muon(
            [("v", sharded)], newton_schulz=torch.clone, exchange=ExchangeSettings(wire="bf16")
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
        "function_wire": "exchange.wire: expected fp32 for Newton-Schulz in fp32",
        "function_form": "exchange.newton_schulz: expected standard with a newton_schulz function",
        "momentum": "momentum_dtype: expected float32 or bfloat16, got torch.float16",
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
    for wire, precision in WIRES:
        wholes, step_whole = _reference(CONVOLUTIONS, wire, precision)

        class Model(torch.nn.Module):
            """Holds them."""

        model = Model()
        model.forward = lambda: None  # type: ignore[assignment]
        for i, whole in enumerate(wholes):
            setattr(model, f"weight{i}", torch.nn.Parameter(whole.detach().clone()))
        fully_shard(model, mesh=mesh)
        muon = Muon(
            [{"params": list(model.named_parameters()), "flatten": True}],
            exchange=ExchangeSettings(wire=wire, max_parts=1),
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
                    different.append(f"{wire}: weight{i}, {what}")
    return different


@pytest.mark.ranks
def test_convolutions_step_as_matrices_of_output_channels():
    """Uneven and empty shards too."""
    for different in run_ranks(3, _step_convolutions).check().results:
        assert different == []


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("has_bf16_gradients", [False, True])
def test_momentum_in_bfloat16_is_rounded_once_a_step(nesterov, has_bf16_gradients):
    """The bits of emerging-optimizers' Muon, whose momentum is rounded after each step."""
    from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon

    if has_bf16_gradients and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("from torch 2.10 on")
    ours, theirs, skipped = (torch.nn.Parameter(drawn((6, 9), 1)) for _ in range(3))
    options = {"lr": 0.1, "nesterov": nesterov, "fp32_matmul_prec": "highest"}
    muon = Muon(
        [ours, skipped],
        exchange=ExchangeSettings(wire="fp32"),
        momentum_dtype=torch.bfloat16,
        **options,
    )
    whole = WholeMatrixMuon([theirs], **options)
    for step in range(NUM_STEPS):
        grad = drawn((6, 9), 50 + step)
        if has_bf16_gradients:
            grad = grad.bfloat16()
            ours.grad_dtype = torch.bfloat16
        ours.grad, theirs.grad = grad.clone(), grad.float()
        muon.step()
        whole.step()
        momentum = whole.state[theirs]["momentum_buffer"]
        momentum.copy_(momentum.bfloat16())
        assert torch.equal(ours, theirs)
        assert torch.equal(muon.state[ours]["momentum_buffer"], momentum.bfloat16())
        assert torch.equal(ours.grad, grad)
    assert torch.equal(skipped, drawn((6, 9), 1))
    # torch loads it in the dtype of the parameter.
    muon.load_state_dict(muon.state_dict())
    assert muon.state[ours]["momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_in_cpu_memory_steps_with_the_same_bits(nesterov, momentum_dtype):
    """On CPU ranks the copies are to the same device; a GPU shows the rest."""
    params = [[torch.nn.Parameter(drawn((6, 9), i)) for i in range(2)] for _ in range(2)]
    options: Any = {"lr": 0.1, "nesterov": nesterov, "momentum_dtype": momentum_dtype}
    optimizers = [
        Muon(of_one, offload_momentum=is_offloaded, **options)
        for of_one, is_offloaded in zip(params, (True, False), strict=True)
    ]
    for step in range(NUM_STEPS):
        for of_one, muon in zip(params, optimizers, strict=True):
            # The other one has no gradient.
            of_one[0].grad = drawn((6, 9), 80 + step)
            muon.step()
    for ours, theirs in zip(*params, strict=True):
        momentum = optimizers[0].state[ours]["momentum_buffer"]
        assert momentum.device.type == "cpu" and momentum.dtype == momentum_dtype
        assert momentum.is_pinned() == (ours.device.type == "cuda")
        assert torch.equal(momentum.to(ours.device), optimizers[1].state[theirs]["momentum_buffer"])
        assert torch.equal(ours, theirs)
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    momentum = optimizers[0].state[params[0][0]]["momentum_buffer"]
    assert momentum.device.type == "cpu" and momentum.dtype == momentum_dtype


def test_memory_that_cannot_be_pinned_is_an_error():
    """Of one rank, which all of them raise."""
    from megatron_muon.fsdp2 import offload

    def fail(_tensor: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory\nmore")

    with mock.patch.object(offload, "_in_cpu_memory", fail), pytest.raises(RuntimeError) as error:
        Muon([torch.nn.Parameter(drawn((6, 9), 0))], offload_momentum=True)
    assert "offload_momentum: expected CPU memory that can be pinned, got CUDA error" in str(
        error.value
    )


def _step_bf16(folder: str) -> list[str]:
    """Step sharded parameters in bfloat16, save and load them; list what differs from float32."""
    import torch.distributed.checkpoint as dcp
    from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    init_group()
    mesh = init_device_mesh(device().type, (torch.distributed.get_world_size(),))
    shapes = [(10, 6), (3, 8)]
    options = {"lr": 1e-3, "nesterov": True, "fp32_matmul_prec": "high"}
    wholes = [torch.nn.Parameter(drawn(x, i).bfloat16().float()) for i, x in enumerate(shapes)]
    reference = WholeMatrixMuon(wholes, **options)

    def build() -> tuple[Any, Any]:
        model = torch.nn.Module()
        model.forward = lambda: None  # type: ignore[assignment]
        for i, shape in enumerate(shapes):
            param = torch.nn.Parameter(drawn(shape, i).bfloat16())
            setattr(model, f"weight{i}", param)
        fully_shard(model, mesh=mesh)
        exchange = ExchangeSettings(wire="fp32", max_parts=1)
        return model, Muon(list(model.named_parameters()), exchange=exchange, **options)

    def step(model: Any, muon: Any, number: int) -> None:
        for i, param in enumerate(model.parameters()):
            grad = drawn(shapes[i], 30 * number + i).bfloat16()
            param.grad = distribute_tensor(grad, mesh, param.placements)
            wholes[i].grad = grad.float()
        muon.step()

    different = []
    model, muon = build()
    for number in range(4):
        if number == 2:
            weights, state = get_state_dict(model, muon)
            dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
            model, muon = build()
            weights, state = get_state_dict(model, muon)
            loaded = {"model": weights, "optim": state}
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(
                model, muon, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"]
            )
        step(model, muon, number)
        reference.step()
        for i, param in enumerate(model.parameters()):
            own = muon.state[param]
            main = own["main_param"].full_tensor()
            assert main.dtype == torch.float32 and param.dtype == torch.bfloat16
            if not torch.equal(main, wholes[i].detach()):
                different.append(f"step {number}: copy {i}")
            if not torch.equal(param.full_tensor(), wholes[i].detach().bfloat16()):
                different.append(f"step {number}: parameter {i}")
            momentum = reference.state[wholes[i]]["momentum_buffer"]
            if not torch.equal(own["momentum_buffer"].full_tensor(), momentum):
                different.append(f"step {number}: momentum {i}")
    # Somebody changes an element: it counts, and the copies of all others are kept.
    (param, _) = model.parameters()
    changed = param.full_tensor().detach().clone()
    changed[0, 0] = 2.0
    with torch.no_grad():
        param.copy_(distribute_tensor(changed, mesh, param.placements))
        wholes[0][0, 0] = 2.0
    step(model, muon, 9)
    reference.step()
    if not torch.equal(muon.state[param]["main_param"].full_tensor(), wholes[0].detach()):
        different.append("after a change")
    return different


@pytest.mark.ranks
def test_parameters_in_bfloat16_step_as_copies_in_float32(tmp_path):
    """The bits of emerging-optimizers' Muon in float32, rounded; through a checkpoint too."""
    for different in run_ranks(2, _step_bf16, str(tmp_path / "saved")).check().results:
        assert different == []


def test_own_function_sees_stacks_of_whole_matrices():
    """It replaces Newton-Schulz; scale and update stay."""
    params = [
        torch.nn.Parameter(drawn(shape, i)) for i, shape in enumerate([(4, 6), (4, 6), (7, 3)])
    ]
    before = [param.detach().clone() for param in params]
    seen = []

    def orthogonalize(stack: Any) -> Any:
        seen.append((tuple(stack.shape), stack.dtype))
        u, _, v = torch.linalg.svd(stack, full_matrices=False)
        return u @ v

    muon = Muon(params, lr=0.1, weight_decay=0.0, newton_schulz=orthogonalize, scale_mode="none")
    for i, param in enumerate(params):
        param.grad = drawn(param.shape, 10 + i)
    muon.step()
    assert {dtype for _, dtype in seen} == {torch.float32}
    assert sum(shape[0] for shape, _ in seen) == 3
    assert {shape[1:] for shape, _ in seen} == {(4, 6), (7, 3)}
    for param, old in zip(params, before, strict=True):
        u, _, v = torch.linalg.svd(param.grad, full_matrices=False)
        # Of a matrix alone and of one in a stack, whose products are rounded otherwise.
        torch.testing.assert_close(param.detach(), old - 0.1 * (u @ v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("result", ["text", "shape", "dtype"])
def test_own_function_that_returns_something_else_is_refused(result):
    """By its first result."""
    param = torch.nn.Parameter(torch.ones(4, 6, device=device()))
    given = {"text": lambda _: "x", "shape": lambda x: x[:, :2], "dtype": lambda x: x.double()}
    muon = Muon([param], newton_schulz=given[result])
    param.grad = torch.eye(4, 6, device=device())
    with pytest.raises(TypeError, match="newton_schulz: expected a function that returns"):
        muon.step()


@pytest.mark.parametrize(
    ("mode", "factor"),
    [
        ("match_adamw", 0.2 * 9**0.5),
        ("spectral", 9**0.5),
        ("spectral_unclamped", (4 / 9) ** 0.5),
        ("none", 1.0),
    ],
)
def test_results_are_scaled_as_the_mode_says(mode, factor):
    """Of an orthogonal matrix, which Newton-Schulz by a function leaves as it is."""
    param = torch.nn.Parameter(torch.zeros(4, 9, device=device()))
    muon = Muon([param], lr=1.0, momentum=0.0, newton_schulz=torch.clone, scale_mode=mode)
    param.grad = torch.eye(4, 9, device=device())
    muon.step()
    expected = -factor * torch.eye(4, 9, device=device())
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=0.0)


def test_rows_that_are_left_are_a_block():
    """By -1 at the end, as torch.reshape names what is left; anything else must add up."""
    ours, theirs = (torch.nn.Parameter(drawn((10, 6), 2)) for _ in range(2))
    grad = drawn((10, 6), 3)
    for param, sizes in ((ours, (3, 3, -1)), (theirs, (3, 3, 4))):
        muon = Muon([{"params": [param], "split_sizes": sizes}], lr=0.1)
        param.grad = grad.clone()
        muon.step()
    assert torch.equal(ours, theirs)
    for sizes in ((3, 3), (-1,), (5, 5, -1), (-1, 3), (3, -2)):
        with pytest.raises(RuntimeError, match="split_sizes: expected"):
            Muon([{"params": [ours], "split_sizes": sizes}])
