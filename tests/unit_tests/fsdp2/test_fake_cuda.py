# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A step on CUDA tensors that do not exist: what it allocates once ranks have agreed to step."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.fake_cuda import Allocation, fake_cuda

from megatron_muon.fsdp2 import Muon, MuonAdamW, muon
from megatron_muon.runtime import norms
from megatron_muon.step.metrics import MetricSums

pytestmark = pytest.mark.cpu_only

SHAPES = [(256, 256)] * 4 + [(1024, 256)] * 2
# Norms of blocks, and factors.
SMALL_BYTES = 1_000


def _matrices(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(*shape, device="cuda", dtype=dtype)) for shape in SHAPES]


def _with_others(**group: Any) -> MuonAdamW:
    # As many elements as the largest workspace of Newton-Schulz.
    embedding = torch.nn.Parameter(torch.empty(8192, 1024, device="cuda"))
    return MuonAdamW([{"params": _matrices()}, {"params": [embedding], **group}])


OPTIMIZERS: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "float32": lambda: Muon(_matrices(), nesterov=True),
    "momentum in bfloat16": lambda: Muon(_matrices(), momentum_dtype=torch.bfloat16),
    "momentum in CPU memory": lambda: Muon(_matrices(), offload_momentum=True),
    "weights in bfloat16": lambda: Muon(_matrices(torch.bfloat16)),
    "namo": lambda: Muon(_matrices(), adaptive="namo"),
    "AdamW": lambda: _with_others(algorithm="adamw", foreach=True),
    "AdamW one by one": lambda: _with_others(algorithm="adamw", foreach=False),
    "Lion": lambda: _with_others(algorithm="lion"),
}
# They allocate what the question before the agreement has asked for, one after the other. Rows are
# moved without temporaries where there is the kernel.
ASKED_FOR = ("newton_schulz/", "fsdp2/muon_adamw.py", "step/lion.py", "runtime/row_moves.py")


def _second_step(
    build: Callable[[], torch.optim.Optimizer],
) -> tuple[list[Allocation], list[Allocation]]:
    """Return the allocations before ranks agree and after it, in the second step."""
    agree = muon.agree_to_step
    with fake_cuda() as recorder:
        num_before = 0

        def agreed(*args: Any) -> Any:
            nonlocal num_before
            found = agree(*args)
            num_before = len(recorder.allocations)
            return found

        optimizer = build()
        with mock.patch.object(muon, "agree_to_step", agreed):
            for _ in range(2):
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.grad = torch.empty_like(param)
                recorder.allocations.clear()
                optimizer.step()
        return recorder.allocations[:num_before], recorder.allocations[num_before:]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_on_a_gpu_allocates_what_ranks_have_agreed_on(name):
    """Momentum in bfloat16 or CPU memory was copied to float32 after ranks had agreed.

    A rank without that memory left the others in a collective until NCCL's time-out.
    """
    before, after = _second_step(OPTIMIZERS[name])
    asked_bytes = max(each.num_bytes for each in before if each.file == "runtime/engine.py")
    assert asked_bytes > 100 * SMALL_BYTES
    for each in after:
        is_asked_for = each.file.startswith(ASKED_FOR)
        assert each.num_bytes <= (asked_bytes if is_asked_for else SMALL_BYTES), each
    # It is no list of nothing: Newton-Schulz has temporaries.
    assert max(each.num_bytes for each in after) > SMALL_BYTES


def test_metrics_of_momentum_in_cpu_memory_wait_for_its_copy():
    """The host summed momentum that the device was still copying to it."""
    events = []
    with fake_cuda():
        optimizer = Muon(_matrices(), offload_momentum=True)
        optimizer.record_metrics()
        stream = mock.Mock()
        stream.synchronize = lambda: events.append("wait")
        with (
            mock.patch("torch.cuda.current_stream", lambda *_: stream),
            mock.patch.object(MetricSums, "advanced", lambda *_: events.append("norms")),
        ):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.empty_like(param)
            optimizer.step()
    # The second wait is for the state, at the end of the step.
    assert events == ["wait", "norms", "wait"]


def test_norm_of_a_missing_gradient_is_summed_on_the_gpu():
    """Zeros in CPU memory stood in for it, among rows on the device."""
    devices: list[str] = []
    original = norms.sums_of_squares

    def watched(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        devices.extend(each.device.type for each in tensors)
        return original(tensors)

    with fake_cuda(), mock.patch.object(norms, "sums_of_squares", watched):
        optimizer = Muon(_matrices(), adaptive="namo")
        params = optimizer.param_groups[0]["params"]
        for param in params[:-1]:
            param.grad = torch.empty_like(param)
        optimizer.step()
    # Of what is orthogonalized too.
    assert devices == ["cuda"] * 2 * len(SHAPES)
