# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A collective starts behind another one."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_muon.runtime.exchange import Chain


def _work(log: list[str], name: str) -> Any:
    return SimpleNamespace(wait=lambda: log.append(f"waited for {name}"))


def test_host_waits_on_gloo():
    """On gloo the host waits for a collective before it starts the next one."""
    log: list[str] = []

    def start(name: str, work: Any = None) -> Any:
        log.append(f"started {name}")
        return work

    chain = Chain(torch.device("cpu"))
    started = [
        chain.after(_work(log, "first"), lambda: start("after first", _work(log, "passed on"))),
        chain.after(None, lambda: start("after nothing")),
    ]
    assert log == ["waited for first", "started after first", "started after nothing"]
    assert started[0] is not None and started[1] is None


def test_second_stream_waits_for_the_step_and_earlier_work():
    """A second stream waits for the step and for the scatter, and the step for neither."""
    log: list[str] = []
    current = "step"

    def new_stream(device: torch.device) -> Any:
        assert device == torch.device("cuda", 1)
        return SimpleNamespace(wait_stream=lambda stream: log.append(f"second waits for {stream}"))

    @contextmanager
    def stream(entered: Any) -> Any:
        nonlocal current
        current = "second"
        yield
        current = "step"

    def start() -> str:
        log.append(f"{current} launches")
        return "work"

    scatter = SimpleNamespace(wait=lambda: log.append(f"{current} waits for the scatter"))
    with mock.patch.multiple(
        torch.cuda, Stream=new_stream, stream=stream, current_stream=lambda device: current
    ):
        chain = Chain(torch.device("cuda", 1))
        assert chain.after(scatter, start) == "work"
        assert chain.after(None, start) == "work"
        # The rank's own shard gets nothing, but it may send as an owner.
        assert chain.after(scatter, lambda: None) is scatter
        assert chain.after(None, lambda: None) is None
    behind_scatter = ["second waits for step", "second waits for the scatter"]
    behind_nothing = ["second waits for step"]
    assert log == [
        *(*behind_scatter, "second launches"),
        *(*behind_nothing, "second launches"),
        *behind_scatter,
        *behind_nothing,
    ]
