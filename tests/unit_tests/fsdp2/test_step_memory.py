# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of a step is taken before ranks agree to step; ``test_fake_cuda.py`` counts it."""

import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.device import init_group
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW
from megatron_muon.runtime.arena import Arena

pytestmark = pytest.mark.cpu_only


EXCHANGE = ExchangeSettings(comm_dtype="fp32", num_buckets=4)


def _muon() -> tuple[Muon, list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(torch.randn(8, 64)) for _ in range(24)]
    return Muon(params, nesterov=True, exchange=EXCHANGE), params


def test_memory_returns_when_ranks_refuse_a_step(monkeypatch):
    """A refused step gives its memory back."""
    allocated, allocate = [], Arena.allocate
    monkeypatch.setattr(Arena, "allocate", lambda x: (allocated.append(x), allocate(x)))
    optimizer, params = _muon()
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
    """A step of the core that nobody reserved memory for reserves it."""
    (asked, params), (direct, others) = _muon(), _muon()
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
