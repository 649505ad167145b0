# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps that cannot be made, or that end in the middle: no rank goes on as if nothing had been."""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.device import device, init_group, kind
from helpers.fsdp2_models import copies, draw_grads, equal, error_of, local, small_model, step
from helpers.ranks import on_ranks, run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.fsdp2 import Muon, MuonAdamW, parameter_groups


def _muon(model: Any, **options: Any) -> Muon:
    named = [("up", model.up.weight), ("down", model.down.weight)]
    return Muon(named, nesterov=True, **options)


def _muon_adamw(model: Any, **options: Any) -> MuonAdamW:
    return MuonAdamW.from_model(model, lr=0.1, **options)


def _sharded() -> tuple[Any, Any]:
    """Build a sharded model and its optimizer, and make a step."""
    model = small_model(is_sharded=True)
    optimizer = _muon_adamw(model)
    step(model, optimizer, 0)
    return model, optimizer


def _attempt(optimizer: Any, *tensors: Any) -> tuple[str, list[bool]]:
    """Step; return the error, and which tensors are as they were."""
    before = [local(each).detach().clone() for each in tensors]
    error = error_of(optimizer.step)
    return error, [torch.equal(old, local(new)) for old, new in zip(before, tensors, strict=True)]


def _refused(optimizer: Any, model: torch.nn.Module) -> str:
    """Step, and return the error; weights and state are as they were."""
    before = copies(model, optimizer)
    error = error_of(optimizer.step)
    assert equal(before, copies(model, optimizer))
    return error


class FailAt(TorchDispatchMode):
    """Raise at an operation, counted from 0; None only lists them.

    They are counted after ``times`` operations whose names begin with ``after``: the operations
    before depend on whether memory of a step has moved.
    """

    def __init__(self, number: int | None, after: str = "", times: int = 0) -> None:
        super().__init__()
        self.number, self.after, self.times = number, after, times
        self.names: list[str] = []

    def __torch_dispatch__(  # noqa: D105
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch.optim marks the beginning and end of a step for profilers.
        if self.times:
            self.times -= str(func).startswith(self.after)
        elif func.namespace != "profiler":
            self.names.append(str(func))
            if len(self.names) - 1 == self.number:
                raise torch.OutOfMemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


HALF = "step: expected weights and state of a complete step"


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (_muon, torch.float32),
        (_muon_adamw, torch.float32),
        pytest.param(_muon_adamw, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_step_after_one_that_ended_in_the_middle(make, dtype):
    """A step that fails at any operation is repeated or refused, never continued halfway."""
    model = small_model(dtype)
    optimizer = make(model)
    step(model, optimizer, 0)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    draw_grads(model.parameters(), 1)

    def load() -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))

    with FailAt(None) as operations:
        optimizer.step()
    expected, refused = copies(model, optimizer), []
    for number, name in enumerate(operations.names):
        load()
        with pytest.raises(RuntimeError), FailAt(number):
            optimizer.step()
        error = error_of(optimizer.step)
        if error != "no error":
            assert HALF in error
            refused.append(number)
            # What to do, as it says.
            load()
            optimizer.step()
        assert equal(copies(model, optimizer), expected), name
    # Before the first change a step may be repeated, and after it never.
    first = refused[0]
    assert 0 < first < len(operations.names) // 4
    assert refused == list(range(first, len(operations.names)))


def _interrupt() -> None:
    """Fail on rank 1 once it has joined all collectives of a step, and on both ranks before.

    The other rank had gone on, with weights that were not those of a step.
    """
    model, optimizer = _sharded()
    with FailAt(None) as operations:
        optimizer.step()
    joined = [i for i, name in enumerate(operations.names) if name.startswith("c10d")]
    last = len(operations.names) - 1 - joined[-1] - 1
    lerp, collectives = ("aten._foreach_lerp", 1), ("c10d", len(joined))
    for number, after in ((0, lerp), (1, lerp), (0, collectives), (last, collectives)):
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        draw_grads(model.parameters(), 1)
        is_failing = dist.get_rank() == 1 or after == lerp
        with FailAt(number if is_failing else None, *after):
            failed = error_of(optimizer.step)
        assert failed.startswith("no memory") == is_failing
        refused = _refused(optimizer, model)
        assert "rank" in refused and f"1: {HALF}" in refused, refused
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert error_of(optimizer.step) == "no error"


def _spoil_gradients() -> None:
    """Change gradients on one rank.

    AdamW's shards had taken different numbers of steps, or one became NaN, in silence.
    """
    is_last = dist.get_rank() == 1
    model, optimizer = _sharded()
    up, norm, embed = model.up.weight, model.norm.weight, model.embed.weight

    def not_finite(param: Any, value: float) -> None:
        if is_last:
            param.grad._local_tensor[0, 0] = value

    def missing(param: Any, rank: int) -> None:
        param.grad = None if is_last == rank else param.grad

    def other_placement() -> None:
        up.grad = distribute_tensor(up.grad.full_tensor(), up.device_mesh, [Shard(1)])

    on_all = "expected a gradient on all ranks that hold the parameter"
    for spoil, said in (
        (lambda: not_finite(up, math.nan), "rank 1: up.weight: expected a finite gradient, got"),
        (lambda: not_finite(embed, math.inf), "rank 1: embed.weight: expected a finite gradient"),
        (lambda: missing(up, 0), f"rank 1: up.weight: {on_all}"),
        (lambda: missing(norm, 1), f"rank 0: norm.weight: {on_all}"),
        (lambda: (missing(up, 0), missing(norm, 1)), f"rank 1: up.weight: {on_all}"),
        (other_placement, "up.weight: expected a gradient like the parameter, local shape (3,"),
    ):
        draw_grads(model.parameters(), 1)
        spoil()
        assert said in _refused(optimizer, model)
    # Nobody has one, or the matrices have none: the others step.
    for params in ([norm, embed], [up]):
        draw_grads(model.parameters(), 1)
        for param in params:
            param.grad = None
        stays = [True] * len(params)
        assert _attempt(optimizer, *params, model.norm.bias) == ("no error", [*stays, False])


def _check_later(make: Callable[..., Any]) -> None:
    """Let rank 1 alone have NaN: ``next_step`` raises on both ranks one step later, ``off`` never.

    A step checks and reduces gradients once, or with ``off`` not at all, as torch's AdamW.
    """
    is_last = dist.get_rank() == 1
    num_reduced, num_checked = {}, {}
    for check in ("sync", "next_step", "off"):
        model = small_model(is_sharded=True)
        optimizer = make(model, check_gradients=check)
        up, embed = model.up.weight, model.embed.weight
        step(model, optimizer, 0)
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with FailAt(None) as operations:
            step(model, optimizer, 1)
        num_reduced[check] = sum(name.startswith("c10d.allreduce") for name in operations.names)
        num_checked[check] = operations.names.count("aten.bitwise_not.default")
        if check == "sync":
            continue
        for number, param in enumerate([up, embed][: 1 + (make is _muon_adamw)]):
            draw_grads(model.parameters(), 2)
            param.grad._local_tensor[0, 0] = math.nan if is_last else 1.0
            assert error_of(optimizer.step) == "no error"
            # Newton-Schulz spreads it over all of a matrix.
            assert bool(local(param).isnan().any()) == (is_last or param is up)
            for call in (optimizer.state_dict, optimizer.step, optimizer.step):
                error = error_of(call)
                if check == "off":
                    assert error == "no error"
                else:
                    assert f"step {3 + 2 * number} of this optimizer: expected finite" in error
                    assert ("expected a finite gradient" if is_last else "other ranks") in error
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
            step(model, optimizer, 3)
        draw_grads(model.parameters(), 4)
        up.grad = up.grad if is_last else None
        assert error_of(optimizer.step) == "no error"
        error = error_of(optimizer.step)
        if check == "next_step":
            assert "rank 1: up" in error and "found a step later" in error
    assert num_checked == {"sync": 1, "next_step": 1, "off": 0}
    assert num_reduced["sync"] == num_reduced["next_step"] == num_reduced["off"] + 1


def _step_without_matrices(has_one: bool) -> None:
    """Spoil a gradient on rank 1, which has no matrix; with ``has_one`` rank 0 has one.

    A rank without matrices stepped alone, whatever others had found.
    """
    rank = dist.get_rank()
    own = [DeviceMesh(kind(), [each]) for each in range(2)]
    model = small_model(is_sharded=True)
    norm = model.norm.weight
    matrix = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), own[0], [Replicate()]))
    plain = torch.nn.Parameter(torch.ones(4, device=device()))
    others: dict[str, Any] = {"params": [("norm", norm), ("plain", plain)], "algorithm": "lion"}
    matrices = [{"params": [("w", matrix)]}] if has_one and rank == 0 else []
    optimizer = MuonAdamW([others, *matrices])
    for number in range(3):
        draw_grads(model.parameters(), number)
        if rank == 0:
            matrix.grad = distribute_tensor(torch.ones(4, 4), own[0], [Replicate()])
        # Nobody says which ranks have others of it: each has its own.
        plain.grad = torch.ones_like(plain) if rank else None
        if number == 1 and rank == 1:
            norm.grad._local_tensor.fill_(math.nan)
        error, stays = _attempt(optimizer, norm, plain)
        if number == 1:
            assert "rank 1: norm: expected a finite gradient" in error and all(stays)
        else:
            assert (error, stays) == ("no error", [False, rank == 0]), error


def _empty_of_another_shape() -> None:
    """Step parameters of which rank 1 holds nothing: no gradient, or another of torch's shapes.

    Torch makes (2, 10, 0) of a shard of (0, 10, 4), and the step was refused.
    """
    mesh = init_device_mesh(kind(), (2,))
    is_empty = dist.get_rank() == 1
    whole = torch.arange(40.0, device=device()).view(1, 10, 4)

    def cut(rows: Any) -> Any:
        shape = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, **shape)

    params = [torch.nn.Parameter(cut(whole[:0] if is_empty else whole.clone())) for _ in range(5)]
    usual, other = torch.ones_like(whole[:0]), torch.ones(1, 10, 0, device=device())
    for i, param in enumerate(params):
        param.grad = cut((usual if i < 2 else other) if is_empty else torch.ones_like(whole))
    a, b, c, d, without = params
    without.grad = None if is_empty else without.grad
    of_adamw = {"params": [("b", b), ("d", d)], "algorithm": "adamw"}
    optimizer = MuonAdamW([{"params": [("a", a), ("c", c), ("without", without)]}, of_adamw])
    assert error_of(optimizer.step) == "no error"
    for one, two in ((a, c), (a, without), (b, d)):
        assert torch.equal(local(one), local(two))
    # A logger may read them afterwards.
    assert d.grad._local_tensor.shape == ((1, 10, 0) if is_empty else (1, 10, 4))


@on_ranks(2)
def test_all_ranks_refuse_a_step_where_one_does():
    """All ranks refuse a step that one was interrupted in, or has wrong gradients for."""
    _interrupt()
    _spoil_gradients()
    for make in (_muon, _muon_adamw):
        _check_later(make)
    for has_one in (True, False):
        _step_without_matrices(has_one)
    _empty_of_another_shape()
    for check in ("sync", "next_step", "off"):
        _differ_in_values(check)


def _differ_in_values(check: str) -> None:
    """Halve a value of a group on rank 1, whose rows would take other steps than their matrix."""
    is_last = dist.get_rank() == 1
    model = small_model(is_sharded=True)
    groups = parameter_groups(model)
    if is_last:
        # Equal values in groups of another number are no difference.
        groups = [
            {**group, "params": [param], "param_names": [name]}
            for group in groups
            for param, name in zip(group["params"], group["param_names"], strict=True)
        ]
    optimizer = MuonAdamW(groups, lr=0.1, check_gradients=check)
    for key, number in ("momentum", 0), ("eps", -1), ("lr", 0), ("lr", -1):
        group = optimizer.param_groups[number]
        value = group[key]
        group[key] = value / 2 if is_last else value
        draw_grads(model.parameters(), 0)
        if check == "next_step":
            assert error_of(optimizer.step) == "no error"
        error = error_of(optimizer.step)
        for rank, own, other in ((0, value, value / 2), (1, value / 2, value)):
            assert re.search(
                f"rank {rank}: param_groups: .*{key} {own}.* got .*{key} {other}", error
            )
        group[key] = value
        if check == "next_step":
            return
    step(model, optimizer, 1)
    step(model, optimizer, 2)


def _leave_in_the_middle() -> list[Any]:
    """Fail on rank 1 before its first collective of rows, where it leaves the job."""
    init_group()
    model, optimizer = _sharded()
    is_last = dist.get_rank() == 1
    with FailAt(0 if is_last else None, "aten._foreach_lerp", 1):
        first = error_of(optimizer.step)
    if is_last:
        # As a process does that ends.
        dist.destroy_process_group()
        return [first]
    return [first, _refused(optimizer, model)]


@pytest.mark.ranks
@pytest.mark.cpu_only
def test_rank_whose_peer_has_left_does_not_step_again():
    """A rank whose peer has left refuses to step again with rows that never came."""
    # Not check(): a rank that has left does not join the last barrier.
    ours, theirs = run_ranks(2, _leave_in_the_middle).results
    assert theirs[0].startswith("no memory")
    assert len(ours) == 2 and "no error" not in ours


def test_sparse_gradient_is_refused_with_its_remedy():
    """A sparse gradient is refused with advice to change its embedding."""
    embedding = torch.nn.Embedding(6, 4, sparse=True, device=device())
    optimizer = _muon_adamw(embedding)
    embedding(torch.tensor([1, 2], device=device())).sum().backward()
    assert "Leave sparse=True out of nn.Embedding" in _refused(optimizer, embedding)


def test_parameters_without_names_are_not_mixed_up():
    """A missing gradient counts for its own parameter alone where two have the name parameter 0."""
    model = small_model()
    first, second, vector = model.up.weight, model.down.weight, model.norm.weight
    optimizer = MuonAdamW([{"params": [first, second]}, {"params": [vector], "algorithm": "adamw"}])
    draw_grads(model.parameters(), 0)
    first.grad = None
    assert _attempt(optimizer, first, second, vector) == ("no error", [True, False, False])
