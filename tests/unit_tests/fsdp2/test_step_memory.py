# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""All memory of a step is taken before ranks agree to step."""

import resource
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.device import init_group
from helpers.ranks import run_ranks
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW, muon

pytestmark = pytest.mark.cpu_only  # counts what torch's CPU allocator does

# What ranks agree with, and other small tensors.
SMALL_BYTES = 300_000
EXCHANGE = ExchangeSettings(comm_dtype="fp32", num_buckets=4)


def _matrices(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    # Wide: Newton-Schulz is short, and its memory is little beside the momentum of all matrices.
    return [torch.nn.Parameter(torch.randn(8, 16_384).to(dtype)) for _ in range(24)]


def _embedding() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(2_048, 512)) for _ in range(2)]


def _muon(dtype: torch.dtype = torch.float32, **options: Any) -> Muon:
    return Muon(_matrices(dtype), nesterov=True, exchange=EXCHANGE, **options)


def _with_others(algorithm: str, **options: Any) -> MuonAdamW:
    groups = [
        {"params": _matrices()},
        {"params": _embedding(), "algorithm": algorithm, **options},
    ]
    return MuonAdamW(groups, exchange=EXCHANGE)


def _with_long_newton_schulz() -> MuonAdamW:
    # AdamW's new state is still there while Newton-Schulz has its temporaries.
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(1024, 1024))]},
        {
            "params": [torch.nn.Parameter(torch.randn(256, 512)) for _ in range(32)],
            "algorithm": "adamw",
            "foreach": False,
        },
    ]
    return MuonAdamW(groups, exchange=EXCHANGE)


def _with_figures() -> Muon:
    optimizer = _muon(momentum_dtype=torch.bfloat16)
    optimizer.record_metrics()
    return optimizer


OPTIMIZERS: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "float32": _muon,
    "momentum in bfloat16": lambda: _muon(momentum_dtype=torch.bfloat16),
    "momentum in CPU memory": lambda: _muon(offload_momentum=True),
    "weights in bfloat16": lambda: _muon(torch.bfloat16),
    "figures": _with_figures,
    "AdamW at once": lambda: _with_others("adamw", foreach=True),
    "AdamW one by one": lambda: _with_others("adamw", foreach=False),
    "AdamW before a long Newton-Schulz": _with_long_newton_schulz,
    "Lion": lambda: _with_others("lion"),
}


def _peaks(step: Callable[[], Any]) -> tuple[int, int]:
    """Return the most memory of a step before ranks agree and after it, beside that of before."""
    real = muon.agree_to_step

    def agree(*args: Any) -> Any:
        found = real(*args)
        with record_function("agreed"):
            return found

    with (
        mock.patch.object(muon, "agree_to_step", agree),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        step()
    events = sorted(
        (event.start_ns(), event.nbytes(), event.name())
        for event in profiled.profiler.kineto_results.events()
        if event.name() in ("[memory]", "agreed")
    )
    (agreed_ns,) = (start for start, _, name in events if name == "agreed")
    now, peaks = 0, [0, 0]
    for start, num_bytes, name in events:
        if name == "[memory]":
            now += num_bytes
            after = start > agreed_ns
            peaks[after] = max(peaks[after], now)
    return peaks[0], peaks[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_allocates_nothing_that_ranks_have_not_agreed_on(name):
    """Momentum in bfloat16 was copied to float32 after ranks had agreed, and AdamW made its state.

    A rank that ran out of memory there raised alone, and the others waited in the exchange.
    """
    torch.manual_seed(0)
    optimizer = OPTIMIZERS[name]()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        if step == 0 and isinstance(optimizer, MuonAdamW):
            optimizer._plan()
        before, after = _peaks(optimizer.step)
        assert before > SMALL_BYTES
        assert after <= before + SMALL_BYTES, f"step {step}"


def test_memory_returns_when_ranks_refuse_a_step():
    """A refused step keeps no memory, which the caller may need."""
    optimizer = _muon()
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, torch.nan)

    def step() -> None:
        with pytest.raises(RuntimeError, match="Nothing was updated"):
            optimizer.step()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    kept = sum(event.nbytes() for event in events if event.name() == "[memory]")
    assert kept < SMALL_BYTES


def _step_without_memory(name: str) -> tuple[str, bool]:
    """Step twice; in the second step rank 1 has little more memory than its results need."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_group()
    mesh = init_device_mesh("cpu", (2,))

    def sharded(*shape: int) -> torch.nn.Parameter:
        drawn = torch.zeros(*shape).normal_()
        return torch.nn.Parameter(distribute_tensor(drawn, mesh, [Shard(0)]))

    is_adamw = name == "AdamW"
    matrices = [sharded(8, 2**17 if not is_adamw else 16) for _ in range(32)]
    num_bytes = 4 * sum(param.to_local().numel() for param in matrices)
    if is_adamw:
        embedding = [sharded(2**14, 2**11)]
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
        param.grad = distribute_tensor(torch.ones(param.shape), mesh, [Shard(0)])
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
@pytest.mark.parametrize("name", ["momentum in bfloat16", "AdamW"])
def test_rank_without_memory_stops_all_ranks_before_the_step(name):
    """A rank ran out of memory in the exchange: it raised alone, and the other one waited."""
    # The rank that waits would do so until this time-out.
    for message, same in run_ranks(2, _step_without_memory, name, timeout_s=90).check().results:
        assert "rank 1" in message
        assert "can't allocate memory" in message
        assert "Nothing was updated" in message
        assert same


def test_step_of_the_core_takes_its_memory_itself():
    """A step without the question for memory before it wrote to an arena that was not there."""
    torch.manual_seed(0)
    asked, direct = _muon(), _muon()
    for one, other in zip(
        asked.param_groups[0]["params"], direct.param_groups[0]["params"], strict=True
    ):
        with torch.no_grad():
            other.copy_(one)
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    asked.step()
    params = direct.param_groups[0]["params"]
    direct.muon_step._matrix_step.step(
        direct.param_groups,
        [param.data for param in params],
        [param.grad for param in params],
        [direct.state[param]["momentum_buffer"] for param in params],
    )
    for one, other in zip(asked.param_groups[0]["params"], params, strict=True):
        assert torch.equal(one, other)
