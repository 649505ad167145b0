# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps that cannot be made, or that end in the middle: no rank goes on as if nothing had been."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.device import device, init_group, kind
from helpers.ranks import Run, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.fsdp2 import Muon, MuonAdamW


class Model(torch.nn.Module):
    """Two matrices of Muon's, an embedding and vectors of AdamW's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6)
        self.norm, self.down = torch.nn.LayerNorm(6), torch.nn.Linear(6, 4)


def _model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(device(), dtype)


def _sharded() -> Model:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model, mesh=init_device_mesh(kind(), (torch.distributed.get_world_size(),)))
    return model


def _muon(model: Model) -> Muon:
    return Muon([("up", model.up.weight), ("down", model.down.weight)], nesterov=True)


def _muon_adamw(model: Model) -> MuonAdamW:
    is_matrix = {id(model.up.weight), id(model.down.weight)}
    named = list(model.named_parameters())
    return MuonAdamW(
        [
            {"params": [(n, p) for n, p in named if id(p) in is_matrix]},
            {"params": [(n, p) for n, p in named if id(p) not in is_matrix], "algorithm": "adamw"},
        ],
        lr=0.1,
    )


def _grads(model: torch.nn.Module, seed: int) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def _stepped(model: Model, make: Callable[[Model], Any] = _muon_adamw) -> tuple[Model, Any]:
    """Build an optimizer, and make a step."""
    optimizer = make(model)
    _grads(model, 0)
    optimizer.step()
    return model, optimizer


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _values(model: torch.nn.Module, optimizer: Any) -> list[Any]:
    """Return copies of this rank's weights and state."""
    params = list(model.parameters())
    states = [each for param in params for each in optimizer.state.get(param, {}).values()]
    return [_local(each).detach().clone() for each in (*params, *states)]


def _is_equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _attempt(optimizer: Any, tensors: list[Any]) -> list[Any]:
    """Step; return the error, and which tensors are as they were."""
    before = [_local(each).detach().clone() for each in tensors]
    error = _error_of(optimizer.step)
    return [
        error,
        [torch.equal(old, _local(new)) for old, new in zip(before, tensors, strict=True)],
    ]


def _attempt_all(optimizer: Any, model: torch.nn.Module) -> list[Any]:
    """Step; return the error, and whether all weights and state are as they were."""
    before = _values(model, optimizer)
    error = _error_of(optimizer.step)
    return [error, _is_equal(before, _values(model, optimizer))]


class FailAt(TorchDispatchMode):
    """Raise at an operation, counted from 0; None only lists them."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number = number
        self.names: list[str] = []

    def __torch_dispatch__(  # noqa: D105
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch.optim marks the beginning and end of a step for profilers.
        if func.namespace != "profiler":
            self.names.append(str(func))
            if len(self.names) - 1 == self.number:
                raise torch.OutOfMemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


def _error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (_muon, torch.float32),
        (_muon_adamw, torch.float32),
        pytest.param(_muon_adamw, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_step_after_one_that_ended_in_the_middle(make, dtype):
    """Each operation in turn ran out of memory: of 174 retries 158 went on with half of a step."""
    model, optimizer = _stepped(_model(dtype), make)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _grads(model, 1)
    with FailAt(None) as operations:
        optimizer.step()
    expected = _values(model, optimizer)
    refused = []
    for number in range(len(operations.names)):
        model, optimizer = _stepped(_model(dtype), make)
        _grads(model, 1)
        with pytest.raises(RuntimeError), FailAt(number):
            optimizer.step()
        error = _error_of(optimizer.step)
        if error == "no error":
            assert _is_equal(_values(model, optimizer), expected), operations.names[number]
            continue
        assert "step: expected weights and state that the previous step left complete" in error
        refused.append(number)
        # What to do, as it says.
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.step()
        assert _is_equal(_values(model, optimizer), expected), operations.names[number]
    # Before the first change a step may be repeated, and after it never.
    first = refused[0]
    assert 0 < first < len(operations.names) // 4
    assert refused == list(range(first, len(operations.names)))


def _end_in_the_middle() -> list[Any]:
    """Fail on rank 1 once it has joined all collectives of a step, and on both ranks before."""
    model, optimizer = _stepped(_sharded())
    with FailAt(None) as operations:
        optimizer.step()
    joined = max(i for i, name in enumerate(operations.names) if name.startswith("c10d"))
    first = next(i for i, name in enumerate(operations.names) if "_foreach_lerp" in name)
    found: list[Any] = []
    is_last = torch.distributed.get_rank() == 1
    for number in (first, first + 1, joined + 1, len(operations.names) - 1):
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        _grads(model, 1)
        is_failing = is_last or number <= first + 1
        with FailAt(number if is_failing else None):
            failed = _error_of(optimizer.step)
        refused, is_same = _attempt_all(optimizer, model)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        found.append([is_failing, is_same, failed, refused, _error_of(optimizer.step)])
    return found


def _spoil_elementwise() -> dict[str, Any]:
    """Spoil gradients of AdamW's half; return errors, and whether anything has changed."""
    is_last = torch.distributed.get_rank() == 1
    model, optimizer = _stepped(_sharded())
    norm, embed = model.norm.weight, model.embed.weight

    def missing() -> None:
        norm.grad = None if is_last else norm.grad

    def infinite() -> None:
        if is_last:
            embed.grad._local_tensor[0, 0] = float("inf")

    def both_kinds() -> None:
        missing()
        model.up.weight.grad = model.up.weight.grad if is_last else None

    found = {}
    for spoil in (missing, infinite, both_kinds):
        _grads(model, 1)
        spoil()
        found[spoil.__name__] = _attempt_all(optimizer, model)
    # Nobody has one, or the matrices have none: the others step.
    for name, params in (("nobody", [norm, embed]), ("matrices", [model.up.weight])):
        _grads(model, 1)
        for param in params:
            param.grad = None
        error, stays = _attempt(optimizer, [*params, model.norm.bias])
        found[name] = [error, stays == [True] * len(params) + [False]]
    return found


def _step_without_matrices(has_one: bool) -> list[Any]:
    """Spoil a gradient on rank 1, which has no matrix; with ``has_one`` rank 0 has one."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    rank = torch.distributed.get_rank()
    own = [DeviceMesh(kind(), [each]) for each in range(2)]
    model = _sharded()
    matrix = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), own[0], [Replicate()]))
    plain = torch.nn.Parameter(torch.ones(4, device=device()))
    norms = [("norm", model.norm.weight), ("plain", plain)]
    groups: list[dict[str, Any]] = [{"params": norms, "algorithm": "lion"}]
    if has_one and rank == 0:
        groups.append({"params": [("w", matrix)]})
    optimizer = MuonAdamW(groups)
    errors = []
    for step in range(3):
        _grads(model, step)
        if rank == 0:
            matrix.grad = distribute_tensor(torch.ones(4, 4), own[0], [Replicate()])
        # Nobody says which ranks have others of it: each has its own.
        plain.grad = torch.ones_like(plain) if rank else None
        if step == 1 and rank == 1:
            model.norm.weight.grad._local_tensor.fill_(float("nan"))
        errors.append(_attempt(optimizer, [model.norm.weight, plain]))
    return errors


def _empty_of_another_shape() -> list[Any]:
    """Step parameters of which rank 1 holds nothing, with another of torch's empty shapes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(kind(), (2,))
    is_empty = torch.distributed.get_rank() == 1
    whole = torch.arange(40.0, device=device()).view(1, 10, 4)

    def cut(local: Any) -> Any:
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    params = [torch.nn.Parameter(cut(whole[:0] if is_empty else whole.clone())) for _ in range(4)]
    usual, other = torch.ones_like(whole[:0]), torch.ones(1, 10, 0, device=device())
    for i, param in enumerate(params):
        param.grad = cut((usual if i < 2 else other) if is_empty else torch.ones_like(whole))
    a, b, c, d = params
    optimizer = MuonAdamW(
        [
            {"params": [("a", a), ("c", c)]},
            {"params": [("b", b), ("d", d)], "algorithm": "adamw"},
        ]
    )
    error = _error_of(optimizer.step)
    pairs = [torch.equal(_local(usual), _local(other)) for usual, other in ((a, c), (b, d))]
    return [error, pairs, tuple(d.grad._local_tensor.shape)]


def _all_faults() -> dict[str, Any]:
    init_group()
    return {
        "end in the middle": _end_in_the_middle(),
        "elementwise": _spoil_elementwise(),
        "matrix on one rank": _step_without_matrices(True),
        "no matrix": _step_without_matrices(False),
        "empty": _empty_of_another_shape(),
    }


@functools.cache
def _run() -> Run:
    return run_ranks(2, _all_faults)


def faults(case: str) -> list[Any]:
    """Return what both ranks of one world found in a case."""
    return [found[case] for found in _run().check().results]


@pytest.mark.ranks
def test_all_ranks_refuse_a_step_after_an_interrupted_one():
    """The other ranks had gone on, with weights that were not those of a step."""
    for found in faults("end in the middle"):
        for is_failing, is_same, failed, refused, loaded in found:
            assert failed.startswith("no memory") == is_failing
            assert (
                "rank" in refused
                and "1: step: expected weights and state that the previous step left complete"
                in refused
            )
            assert is_same and loaded == "no error"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("missing", "rank 0: norm.weight: expected a gradient on all ranks that hold the parame"),
        ("infinite", "rank 1: embed.weight: expected a finite gradient, got NaN or Inf"),
        ("both_kinds", "rank 1: up.weight: expected a gradient on all ranks that hold the paramet"),
        ("nobody", "no error"),
        ("matrices", "no error"),
    ],
)
def test_gradients_of_adamw_are_checked_as_those_of_muon(case, said):
    """Its shards had taken different numbers of steps, or one of them became NaN, in silence."""
    for found in faults("elementwise"):
        error, is_fine = found[case]
        assert said in error and is_fine


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["matrix on one rank", "no matrix"])
def test_rank_without_matrices_agrees_on_a_step(case):
    """It stepped alone, whatever others had found."""
    for rank, (first, second, third) in enumerate(faults(case)):
        assert first == third == ["no error", [False, rank == 0]]
        assert "rank 1: norm: expected a finite gradient" in second[0] and second[1] == [True, True]


@pytest.mark.ranks
def test_empty_gradient_may_have_another_empty_shape():
    """Torch makes (2, 10, 0) of a shard of (0, 10, 4), and the step was refused."""
    results = faults("empty")
    assert [each[:2] for each in results] == [["no error", [True, True]]] * 2
    # A logger may read them afterwards.
    assert [each[2] for each in results] == [[1, 10, 4], [1, 10, 0]]


def _leave_in_the_middle() -> list[Any]:
    """Fail on rank 1 before its first collective of rows, where it leaves the job."""
    import torch.distributed as dist

    init_group()
    model, optimizer = _stepped(_sharded())
    with FailAt(None) as operations:
        optimizer.step()
    number = next(i for i, name in enumerate(operations.names) if "_foreach_lerp" in name)
    is_last = dist.get_rank() == 1
    with FailAt(number if is_last else None):
        first = _error_of(optimizer.step)
    if is_last:
        # As a process does that ends.
        dist.destroy_process_group()
        return [first]
    return [first, *_attempt_all(optimizer, model)]


@pytest.mark.ranks
@pytest.mark.cpu_only
def test_rank_whose_peer_has_left_does_not_step_again():
    """Its rows never came: a retry must not take what is there."""
    # Not check(): a rank that has left does not join the last barrier.
    ours, theirs = run_ranks(2, _leave_in_the_middle).results
    assert theirs[0].startswith("no memory")
    assert "no error" not in ours[:2] and ours[2]


def test_parameters_without_names_are_not_mixed_up():
    """The first matrix and the first vector are both parameter 0, and one has no gradient."""
    model = _model()
    first, second, vector = model.up.weight, model.down.weight, model.norm.weight
    optimizer = MuonAdamW([{"params": [first, second]}, {"params": [vector], "algorithm": "adamw"}])
    _grads(model, 0)
    first.grad = None
    assert _attempt(optimizer, [first, second, vector]) == ["no error", [True, False, False]]
