# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Momentum and float32 copies that a step stores: in CPU memory, in bfloat16, beside weights."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.device import device
from helpers.fsdp2_models import drawn

from megatron_muon.fsdp2 import Muon
from megatron_muon.newton_schulz.standard import Standard
from megatron_muon.runtime.arena import Arena
from megatron_muon.step import matrix_step, stored_state

# The first step, and one after a load, need no call.
ANNOUNCEMENTS: dict[str, Callable[[Muon], None]] = {
    "construction": lambda _: None,
    "call": Muon.refresh_main_params,
    "load": lambda muon: muon.load_state_dict(muon.state_dict()),
    "removed state": lambda muon: muon.state.clear(),
}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _step_by_nothing(muon: Muon) -> None:
    """Step with a learning rate of 0, after which copies are as the step found them."""
    for group in muon.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    muon.step()


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("announcement", ANNOUNCEMENTS)
def test_changed_weight_counts_once_it_is_announced(announcement, is_refused):
    """Elements of an announced weight that differ from their rounded copy replace it."""
    param = torch.nn.Parameter(drawn((6, 9), 0).bfloat16().to(device()))
    muon = Muon([param], lr=1e-3)
    if announcement != "construction":
        param.grad = torch.ones_like(param)
        muon.step()
    main = muon.state[param]["main_param"].clone()
    ANNOUNCEMENTS[announcement](muon)
    if is_refused:
        param.grad = torch.full_like(param, torch.nan)
        with pytest.raises(RuntimeError, match="Nothing was updated"):
            muon.step()
    param.data[:, 0] = 2.0
    expected = param.float() if announcement == "removed state" else main.clone()
    expected[:, 0] = 2.0
    _step_by_nothing(muon)
    assert torch.equal(muon.state[param]["main_param"], expected)
    assert torch.equal(param, expected.bfloat16())
    # Without a word the copy is right, and the weight follows it.
    param.data[:, 1] = 3.0
    _step_by_nothing(muon)
    assert torch.equal(param, expected.bfloat16())


@pytest.mark.parametrize("is_transposed", [False, True])
def test_copies_follow_to_the_bit(is_transposed):
    """Copies follow NaN, infinity, signed zeros and the smallest numbers to the bit."""
    smallest = 2.0**-133
    own = drawn((8, 6), 0).bfloat16()
    own[0] = torch.tensor([0.0, -0.0, smallest, -smallest, 2 * smallest, 1.0])
    own[1] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.3e38, 1.0, 1.0])
    own = own.to(device())
    param = torch.nn.Parameter(own.T.contiguous().T if is_transposed else own)
    other = torch.nn.Parameter(drawn((5, 4), 2).bfloat16().to(device()))
    muon = Muon([param, other], lr=1e-3, weight_decay=0.0)
    mains = [muon.state[each]["main_param"] for each in (param, other)]
    for main in mains:
        # Less than half of a step of bfloat16.
        main.mul_(1 + 2.0**-12)
    old = [main.clone() for main in mains]
    with torch.no_grad():
        param.data[0] = torch.tensor([smallest, smallest, 2 * smallest, smallest, 0.0, -0.0])
        param.data[1, 2:] = torch.tensor([1.0, torch.nan, torch.inf, -1.0])
        param.data[2, 0].copy_(torch.nextafter(param.data[2, 0], param.data[2, 0] + 1))
        param.data[3].neg_()
        assert muon.muon.reserve() == []
    muon.muon.release()
    for main, before, own in zip(mains, old, (param, other), strict=True):
        expected = torch.where(before.to(own.dtype) == own, before, own)
        assert torch.equal(main.isnan(), expected.isnan())
        assert torch.equal(_bits(main.nan_to_num(7.0)), _bits(expected.nan_to_num(7.0)))


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
    # Memory in which momentum was rounded is Newton-Schulz's.
    assert streams.beside_exchange == {0}


def test_copies_end_with_a_step_that_raises():
    """Copies end with a step that raises, before momentum may be loaded."""

    def fail(matrices: torch.Tensor) -> torch.Tensor:
        raise ValueError("a user's function")

    with _streams_of_a_gpu(is_late=True) as streams:
        with pytest.raises(ValueError, match="a user's function"):
            _stepped(newton_schulz=fail, offload_momentum=True)
        assert streams.num_copies > 0 and not streams.queue
