# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies of momentum to CPU memory on a stream of their own, as late and as early as it may run."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.fsdp2_models import drawn

from megatron_muon.fsdp2 import Muon
from megatron_muon.newton_schulz.standard import Standard
from megatron_muon.runtime.arena import Arena
from megatron_muon.step import matrix_step, stored_state

SHAPES = [(6, 9), (40, 8), (5, 3), (24, 16), (8, 8), (12, 30), (7, 40)]
NUM_STEPS = 3


class _Streams:
    """Streams of which the current one runs at once, and the other when somebody waits for it."""

    def __init__(self, is_late: bool) -> None:
        self.is_late, self.is_other = is_late, False
        self.queue: list[Callable[[], Any]] = []
        self.most_waiting = self.num_copies = 0
        # Copies that wait when matrices begin to be orthogonalized.
        self.beside_exchange: set[int] = set()

    def run(self, function: Callable[[], Any]) -> None:
        self.num_copies += self.is_other
        if not self.is_other or not self.is_late:
            function()
            return
        self.queue.append(function)
        self.most_waiting = max(self.most_waiting, len(self.queue))

    @contextmanager
    def other(self, *_: Any) -> Iterator[None]:
        self.is_other = True
        yield
        self.is_other = False

    def wait(self, end: int) -> None:
        """Run the other stream up to its end at some time, counted from the beginning."""
        while self.queue and self.num_copies - len(self.queue) < end:
            self.queue.pop(0)()


@contextmanager
def _streams_of_a_gpu(is_late: bool) -> Iterator[_Streams]:
    """Let momentum in CPU memory be copied back as on a GPU, where all memory is a CPU's."""
    streams = _Streams(is_late)
    copy_, build = torch._foreach_copy_, matrix_step.MomentumStaging
    run = Standard.run

    def orthogonalize(*args: Any) -> torch.Tensor:
        streams.beside_exchange.add(len(streams.queue))
        return run(*args)

    stream = SimpleNamespace(
        # The current stream is never behind.
        wait_stream=lambda _: None,
        record_event=lambda: streams.num_copies,
        wait_event=streams.wait,
        synchronize=lambda: None,
    )

    def on_a_gpu(*args: Any, device: torch.device, **options: Any) -> Any:
        return build(*args, device=torch.device("cuda", 0), **options)

    def in_memory_of_the_cpu(num_bytes: int, _: torch.device, purpose: str) -> Arena:
        return Arena(num_bytes, torch.device("cpu"), purpose)

    replaced = [
        (torch.cuda, "Stream", lambda *_: stream),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "stream", streams.other),
        (torch, "_foreach_copy_", lambda *args, **_: streams.run(lambda: copy_(*args))),
        (matrix_step, "MomentumStaging", on_a_gpu),
        (stored_state, "Arena", in_memory_of_the_cpu),
        (Standard, "run", orthogonalize),
        (matrix_step, "PORTION_ELEMENTS", 400),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield streams


def _stepped(**options: Any) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(drawn(shape, i)) for i, shape in enumerate(SHAPES)]
    muon = Muon(params, lr=0.1, **options)
    for step in range(NUM_STEPS):
        for i, param in enumerate(params):
            # One has no gradient in one step.
            param.grad = None if (step, i) == (1, 3) else drawn(param.shape, 100 * step + i)
        muon.step()
    return [*params, *(muon.state[param]["momentum_buffer"] for param in params)]


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_may_be_late_as_long_as_nobody_waits(dtype, nesterov, is_late):
    """Staging memory is written and freed only after its last copy has read it."""
    options = {"nesterov": nesterov, "momentum_dtype": dtype}
    expected = _stepped(**options)
    with _streams_of_a_gpu(is_late) as streams:
        found = _stepped(**options, offload_momentum=True)
    assert all(map(torch.equal, found, expected))
    # All of them ran, and two portions were in flight.
    assert not streams.queue and streams.num_copies > 2 * NUM_STEPS
    assert streams.most_waiting == 2 * is_late
    # Memory in which momentum was rounded is Newton-Schulz's: only float32 is copied beside it.
    assert streams.beside_exchange == {2 if is_late and dtype == torch.float32 else 0}


def test_copies_end_with_a_step_that_raises():
    """Copies end with a step that raises, before momentum may be loaded."""

    def fail(matrices: torch.Tensor) -> torch.Tensor:
        raise ValueError("a user's function")

    with _streams_of_a_gpu(is_late=True) as streams:
        with pytest.raises(ValueError, match="a user's function"):
            _stepped(newton_schulz=fail, offload_momentum=True)
        assert streams.num_copies > 0 and not streams.queue
