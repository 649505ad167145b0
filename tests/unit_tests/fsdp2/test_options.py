# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory, own functions, scales, splits and figures of Muon for FSDP2."""

import resource
import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.device import device, init_group
from helpers.fsdp2_models import FSDP2, draw_grads, drawn
from helpers.ranks import ROOT, on_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW
from megatron_muon.runtime.arena import Arena


def _stepped(*shapes: tuple[int, int], num_steps: int = 1, **options: Any) -> tuple[Muon, Any]:
    """Step parameters of one rank with gradients that are drawn."""
    params = [torch.nn.Parameter(drawn(shape, i)) for i, shape in enumerate(shapes)]
    group = {"params": params, "split_sizes": options.pop("split_sizes", None)}
    muon = Muon([group], lr=0.1, **options)
    for step in range(num_steps):
        draw_grads(params, step)
        muon.step()
    return muon, params


def orthogonal(stack: Any) -> Any:
    """Return what Newton-Schulz approximates."""
    u, _, v = torch.linalg.svd(stack, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("adaptive", [None, "normuon", "namo"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_state_in_cpu_memory_steps_with_the_same_bits(nesterov, adaptive):
    """State in CPU memory has the bits of state on the device, also after a load."""
    options: Any = {"num_steps": 3, "nesterov": nesterov, "adaptive": adaptive}
    ours, (param,) = _stepped((6, 9), offload_state=True, **options)
    theirs, (other,) = _stepped((6, 9), **options)
    assert torch.equal(param, other)
    for _ in range(2):
        states = zip(ours.state[param].values(), theirs.state[other].values(), strict=True)
        pairs = [(own, their) for own, their in states if torch.is_tensor(own) and own.dim()]
        assert all(own.device.type == "cpu" for own, _ in pairs)
        assert all(torch.equal(own, their.cpu()) for own, their in pairs)
        ours.load_state_dict(theirs.state_dict())


def test_own_function_sees_stacks_of_whole_matrices():
    """A user's function replaces Newton-Schulz on stacks, before scale and update."""
    seen = []

    def orthogonalize(stack: Any) -> Any:
        seen.append((len(stack), stack.shape[1:], stack.dtype))
        return orthogonal(stack)

    shapes = [(4, 6), (4, 6), (7, 3)]
    options: Any = {"weight_decay": 0.0, "scale_mode": "none"}
    _, params = _stepped(*shapes, newton_schulz=orthogonalize, **options)
    assert sum(size for size, *_ in seen) == 3
    assert {(shape, dtype) for _, shape, dtype in seen} == {(x, torch.float32) for x in shapes}
    for i, param in enumerate(params):
        # Of a matrix alone and of one in a stack, whose products are rounded otherwise.
        expected = drawn(param.shape, i) - 0.1 * orthogonal(param.grad)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-4, atol=1e-5)


def test_own_method_is_called_with_results_and_its_state():
    """The method of docs/optimizers.md is called with results and keeps its state.

    The gradient is the same in both steps, so results are too: the mean square of a row is averaged
    to 0.05 of it, and then to 0.0975. Newton-Schulz of a multiple in float32 differs by 1e-6.
    """
    text = (ROOT / "docs" / "optimizers.md").read_text()
    code = text.partition("<!-- own method -->\n")[2].partition("\n\n    # end")[0]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    start, grad = drawn((6, 4), 0), drawn((6, 4), 1)
    moved, moments = [], []
    for method in (None, names["RowRMS"]()):
        param = torch.nn.Parameter(start.clone())
        muon = names["Muon"](
            [param],
            lr=0.1,
            weight_decay=0.0,
            fp32_matmul_prec="highest",
            scale_mode="none",
            adaptive=method,
        )
        for _ in range(2):
            param.grad = grad.clone()
            muon.step()
        moved.append(start - param.detach())
        moments.append(muon.state[param].get("moment2_of_owner"))
    results = moved[0] / 0.2
    expected = 0.1 * (0.05**0.5 + 0.0975**0.5) * results
    torch.testing.assert_close(moved[1], expected, rtol=1e-4, atol=1e-6)
    means = 0.0975 * results.square().mean(1)
    torch.testing.assert_close(moments[1].flatten(), means, rtol=1e-4, atol=0.0)


def _replace_tensor(state: dict[str, Any], key: str) -> None:
    before, state[key] = state[key], state[key].clone()
    before.fill_(float("nan"))


def _replace_storage(state: dict[str, Any], key: str) -> None:
    before = state[key].detach()
    state[key].data = before.clone()
    before.fill_(float("nan"))


@pytest.mark.parametrize("method", [None, "normuon", "namo", "adamuon"])
@pytest.mark.parametrize("offload", [_replace_tensor, _replace_storage])
def test_state_that_was_offloaded_between_steps_is_followed(method, offload):
    """Tensors of a state that trainers replace between steps are the ones that the step uses."""
    found = []
    for is_offloaded in (False, True):
        params = [torch.nn.Parameter(drawn(shape, 0)) for shape in ((9, 4), (2, 3, 5))]
        muon = Muon(params, lr=0.1, adaptive=method)
        for step in range(3):
            for i, param in enumerate(params):
                param.grad = drawn(param.shape, 10 * step + i)
            muon.step()
            for state in muon.state.values() if is_offloaded else ():
                for key in [key for key, value in state.items() if torch.is_tensor(value)]:
                    offload(state, key)
        states = (value for param in params for value in muon.state[param].values())
        tensors = filter(torch.is_tensor, states)
        found.append([*(param.detach() for param in params), *tensors])
    assert all(map(torch.equal, *found))


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
    """Results are scaled by the factor of each mode."""
    param = torch.nn.Parameter(torch.zeros(4, 9, device=device()))
    muon = Muon([param], lr=1.0, momentum=0.0, newton_schulz=torch.clone, scale_mode=mode)
    param.grad = torch.eye(4, 9, device=device())
    muon.step()
    expected = -factor * torch.eye(4, 9, device=device())
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=0.0)


def test_rows_that_are_left_are_a_block():
    """A last size of -1 takes the remaining rows."""
    (_, (ours,)), (_, (theirs,)) = (
        _stepped((10, 6), split_sizes=sizes) for sizes in ((3, 3, -1), (3, 3, 4))
    )
    assert torch.equal(ours, theirs)


def _metrics(case: str) -> list[Any]:
    """Return the metrics of two steps, and the same from whole tensors."""
    parameters = FSDP2[4][case]()
    params = [each.param for each in parameters]
    muon = Muon(
        [{"params": [each.param], **each.keys} for each in parameters],
        lr=0.5,
        weight_decay=0.0,
        nesterov=True,
    )
    muon.record_metrics()

    def whole(tensors: Any) -> list[Any]:
        return [each.full_tensor().detach().clone() for each in tensors]

    found = []
    for step in range(2):
        for i, each in enumerate(parameters):
            each.draw_grad(9 * step + i)
        before = whole(params)
        muon.step()
        momentum = whole(muon.state[param]["momentum_buffer"] for param in params)
        updates = [(old - new) / 0.5 for old, new in zip(before, whole(params), strict=True)]
        of_whole = [
            [float(each.norm()) for each in whole(param.grad for param in params)],
            [float(each.norm()) for each in momentum],
            [float(each.square().mean().sqrt()) for each in updates],
        ]
        found.append([list(muon.last_metrics()), of_whole])
    return found


@on_ranks(4)
def test_metrics_equal_those_of_whole_tensors():
    """Metrics count rows that several ranks hold once, and are equal on all ranks."""
    for metrics, expected in (*_metrics("hybrid"), *_metrics("hybrid_tensor_parallel")):
        # Sums in float32, in another order; updates are differences of weights of about 1.
        torch.testing.assert_close(
            torch.tensor(metrics), torch.tensor(expected), rtol=1e-4, atol=1e-4
        )
        by_rank: list[Any] = [None] * 4
        dist.all_gather_object(by_rank, metrics)
        assert by_rank == [metrics] * 4


def test_phases_of_a_step_are_ranges_of_a_profile():
    """Phases of a step, AdamW's among them, are named ranges of a profile."""
    matrix, vector = (torch.nn.Parameter(torch.ones(n, device=device())) for n in ((2, 3), (2,)))
    optimizer = MuonAdamW(
        [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}], lr=0.1
    )
    for each in (matrix, vector):
        each.grad = torch.ones_like(each)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = {event.key for event in profile.key_averages()}
    phases = {"momentum", "norms", "local_matrices", "update", "elementwise"}
    assert {f"Muon.{phase}" for phase in phases} <= names


EXCHANGE = ExchangeSettings(comm_dtype="fp32", num_buckets=4)


def _of_matrices() -> tuple[Muon, list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(torch.randn(8, 64)) for _ in range(24)]
    return Muon(params, nesterov=True, exchange=EXCHANGE), params


@pytest.mark.cpu_only
def test_memory_returns_when_ranks_refuse_a_step(monkeypatch):
    """A refused step gives its memory back."""
    allocated, allocate = [], Arena.allocate
    monkeypatch.setattr(Arena, "allocate", lambda x: (allocated.append(x), allocate(x)))
    optimizer, params = _of_matrices()
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    with pytest.raises(RuntimeError, match="Nothing was updated"):
        optimizer.step()
    sizes = [arena.view(0, 0, torch.uint8).untyped_storage().nbytes() for arena in allocated]
    assert sizes and not any(sizes)


def _step_without_memory(name: str) -> tuple[str, bool]:
    """Step twice; in the second step rank 1 has little more memory than its results need."""
    init_group()
    mesh = init_device_mesh("cpu", (2,))

    def sharded(whole: torch.Tensor) -> Any:
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

    is_adamw = name == "AdamW"
    shape = (8, 16 if is_adamw else 2**17)
    matrices = [torch.nn.Parameter(sharded(torch.zeros(shape))) for _ in range(32)]
    num_bytes = 4 * sum(param.to_local().numel() for param in matrices)
    if is_adamw:
        embedding = [torch.nn.Parameter(sharded(torch.zeros(2**14, 2**11)))]
        optimizer: Any = MuonAdamW(
            [{"params": matrices}, {"params": embedding, "algorithm": "adamw", "foreach": True}],
            exchange=EXCHANGE,
        )
        params, num_bytes = matrices + embedding, 2**25
    else:
        options = {"exchange": ExchangeSettings(comm_dtype="fp32", num_buckets=16)}
        optimizer = Muon(matrices, momentum_dtype=torch.bfloat16, **options)
        params, num_bytes = matrices, num_bytes * 3 // 2
    for param in params:
        param.grad = sharded(torch.ones(param.shape))
    optimizer.step()
    before = [param.to_local().clone() for param in params]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == 1:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, limits[1]))
    try:
        optimizer.step()
        message = "stepped"
    except RuntimeError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    same = all(torch.equal(a, b.to_local()) for a, b in zip(before, params, strict=True))
    return message, same


@pytest.mark.ranks
@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["momentum in bfloat16", "AdamW"])
def test_rank_without_memory_stops_all_ranks_before_the_step(name):
    """A rank without memory stops all ranks before the exchange."""
    # The rank that waits would do so until this time-out.
    for message, same in run_ranks(2, _step_without_memory, name, timeout_s=90).check().results:
        assert "rank 1" in message
        assert "can't allocate memory" in message and " bytes on cpu for " in message
        assert "Nothing was updated" in message
        assert same


@pytest.mark.cpu_only
def test_step_of_the_core_takes_its_memory_itself():
    """A step of the core allocates its memory itself if ``reserve()`` was not called."""
    (asked, params), (direct, others) = _of_matrices(), _of_matrices()
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param.data)
        param.grad = torch.randn_like(param)
    grads = [param.grad.clone() for param in params]
    asked.step()
    direct.muon._matrix_step.step(
        direct.param_groups,
        [other.data for other in others],
        grads,
        [direct.state[other]["momentum_buffer"] for other in others],
    )
    assert all(map(torch.equal, params, others))
