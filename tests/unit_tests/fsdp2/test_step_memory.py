# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""All memory of a step is taken before ranks agree to step: on fake CUDA tensors, and on ranks."""

import resource
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.device import init_group
from helpers.fake_cuda import fake_cuda
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW
from megatron_muon.fsdp2.gradients import Agreement
from megatron_muon.runtime import norms
from megatron_muon.runtime.arena import Arena
from megatron_muon.step.metrics import MetricSums

pytestmark = pytest.mark.cpu_only


class Tensors(NamedTuple):
    """Parameters of an optimizer: a device, and shapes of matrices and of others."""

    device: str
    shapes: Sequence[tuple[int, int]]
    others: Sequence[tuple[int, int]]
    exchange: ExchangeSettings

    def make(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Any:
        return [torch.nn.Parameter(torch.randn(s, device=self.device, dtype=dtype)) for s in shapes]

    def muon(self, dtype: torch.dtype = torch.float32, **options: Any) -> Muon:
        params = self.make(self.shapes, dtype)
        return Muon(params, nesterov=True, exchange=self.exchange, **options)

    def muon_and(self, algorithm: str, **options: Any) -> MuonAdamW:
        others = {"params": self.make(self.others), "algorithm": algorithm, **options}
        return MuonAdamW([{"params": self.make(self.shapes)}, others], exchange=self.exchange)


EXCHANGE = ExchangeSettings(comm_dtype="fp32", num_buckets=4)
ON_CPU = Tensors("cpu", [(8, 64)] * 24, [], EXCHANGE)
# The embedding has as many elements as the largest workspace of Newton-Schulz.
ON_GPU = Tensors("cuda", [(256, 256)] * 4 + [(1024, 256)] * 2, [(8192, 1024)], ExchangeSettings())


def _with_metrics(tensors: Tensors) -> Muon:
    optimizer = tensors.muon(momentum_dtype=torch.bfloat16)
    optimizer.record_metrics()
    return optimizer


# test_fake_cuda.py has float32.
OPTIMIZERS: dict[str, Callable[[Tensors], torch.optim.Optimizer]] = {
    "momentum in bfloat16": lambda tensors: tensors.muon(momentum_dtype=torch.bfloat16),
    "momentum in CPU memory": lambda tensors: tensors.muon(offload_momentum=True),
    "weights in bfloat16": lambda tensors: tensors.muon(torch.bfloat16),
    "AdamW at once": lambda tensors: tensors.muon_and("adamw", foreach=True),
    "AdamW one by one": lambda tensors: tensors.muon_and("adamw", foreach=False),
    "cautious decay": lambda tensors: tensors.muon(weight_decay_method="cautious"),
    "Lion": lambda tensors: tensors.muon_and("lion"),
    "namo": lambda tensors: tensors.muon(adaptive="namo"),
    "metrics": _with_metrics,
}
# Norms of blocks and factors.
SMALL_BYTES = 1_000


def _set_grads(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)


def test_weights_in_bfloat16_are_compared_in_the_first_step_alone():
    """Later steps compare no weight with its copy, which would take 7 bytes an element."""
    with fake_cuda() as recorder:
        optimizer = ON_GPU.muon(torch.bfloat16)
        for num_compared in (len(ON_GPU.shapes), 0):
            _set_grads(optimizer)
            recorder.clear()
            optimizer.step()
            assert recorder.operations["aten::where"] == num_compared


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_allocates_what_ranks_have_agreed_on(name):
    """All memory of a step on a GPU is taken before ranks agree."""
    agree = Agreement.check
    num_before = 0

    def agreed(*args: Any) -> Any:
        nonlocal num_before
        found = agree(*args)
        num_before = len(recorder.allocations)
        return found

    with fake_cuda() as recorder, mock.patch.object(Agreement, "check", agreed):
        optimizer = OPTIMIZERS[name](ON_GPU)
        # The first one makes state.
        for _ in range(2):
            _set_grads(optimizer)
            recorder.clear()
            optimizer.step()
            assert recorder.not_agreed_on(num_before, SMALL_BYTES) == []


def test_memory_returns_when_ranks_refuse_a_step(monkeypatch):
    """A refused step gives its memory back."""
    allocated, allocate = [], Arena.allocate
    monkeypatch.setattr(Arena, "allocate", lambda x: (allocated.append(x), allocate(x)))
    optimizer = ON_CPU.muon()
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, torch.nan)
    with pytest.raises(RuntimeError, match="Nothing was updated"):
        optimizer.step()
    sizes = [arena.view(0, 0, torch.uint8).untyped_storage().nbytes() for arena in allocated]
    assert sizes and not any(sizes)


def test_metrics_of_momentum_in_cpu_memory_wait_for_its_copy():
    """Metrics of momentum in CPU memory wait until the device has copied it."""
    events = []
    with fake_cuda():
        optimizer = ON_GPU.muon(offload_momentum=True)
        optimizer.record_metrics()
        stream = mock.Mock()
        stream.synchronize = lambda: events.append("wait")
        with (
            mock.patch("torch.cuda.current_stream", lambda *_: stream),
            mock.patch.object(MetricSums, "on_momentum", lambda *_: events.append("norms")),
        ):
            _set_grads(optimizer)
            optimizer.step()
    # The second wait is for the state, at the end of the step.
    assert events == ["wait", "norms", "wait"]


def test_norm_of_a_missing_gradient_is_summed_on_the_gpu():
    """Zeros for a missing gradient are on the device, among the rows of the others."""
    devices: list[str] = []
    original = norms.sums_of_squares

    def watched(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        devices.extend(each.device.type for each in tensors)
        return original(tensors)

    with fake_cuda(), mock.patch.object(norms, "sums_of_squares", watched):
        optimizer = ON_GPU.muon(adaptive="namo")
        _set_grads(optimizer)
        optimizer.param_groups[0]["params"][-1].grad = None
        optimizer.step()
    # Of what is orthogonalized too.
    assert devices == ["cuda"] * 2 * len(ON_GPU.shapes)


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
@pytest.mark.parametrize("name", ["momentum in bfloat16", "AdamW"])
def test_rank_without_memory_stops_all_ranks_before_the_step(name):
    """A rank without memory stops all ranks before the exchange."""
    # The rank that waits would do so until this time-out.
    for message, same in run_ranks(2, _step_without_memory, name, timeout_s=90).check().results:
        assert "rank 1" in message
        assert "can't allocate memory" in message and " bytes on cpu for " in message
        assert "Nothing was updated" in message
        assert same


def test_step_of_the_core_takes_its_memory_itself():
    """A step of the core allocates its memory itself if ``reserve()`` was not called."""
    asked, direct = ON_CPU.muon(), ON_CPU.muon()
    params, others = (each.param_groups[0]["params"] for each in (asked, direct))
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param.data)
    _set_grads(asked)
    grads = [param.grad.clone() for param in params]
    asked.step()
    direct.muon._matrix_step.step(
        direct.param_groups,
        [other.data for other in others],
        grads,
        [direct.state[other]["momentum_buffer"] for other in others],
    )
    assert all(map(torch.equal, params, others))
