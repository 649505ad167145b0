# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A collective starts behind another one."""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_muon.runtime.exchange import Chain


class _Work:
    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def wait(self) -> None:
        self._log.append(f"waited for {self._name}")


def _start(log: list[str], name: str, work: Any = None) -> Any:
    def start() -> Any:
        log.append(f"started {name}")
        return work

    return start


def test_gloo_starts_a_collective_when_the_step_waits_for_it():
    """Behind the collective before it, on the thread of the step, and not in a step that failed."""
    log: list[str] = []
    first, passed_on = (_Work(log, name) for name in ("first", "passed on"))
    chain = Chain(torch.device("cpu"))
    started = [
        chain.after(first, _start(log, "after first", passed_on)),
        chain.after(None, _start(log, "after nothing")),
    ]
    assert log == []
    for each in started:
        each.wait()
    assert log == [
        "waited for first",
        "started after first",
        "waited for passed on",
        "started after nothing",
    ]


def test_second_stream_waits_for_the_step_and_earlier_work():
    """The calls that a GPU gets: the stream of the step is made to wait for nothing."""
    log: list[str] = []
    current = "the stream of the step"

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == torch.device("cuda", 1)

        def wait_stream(self, stream: str) -> None:
            log.append(f"second stream waits for {stream}")

    @contextmanager
    def stream(entered: Any) -> Any:
        nonlocal current
        current = "the second stream"
        yield
        current = "the stream of the step"

    class Work:
        def wait(self) -> None:
            log.append(f"{current} waits for the scatter")

    def start() -> str:
        log.append(f"{current} launches")
        return "work"

    with mock.patch.multiple(
        torch.cuda, Stream=Stream, stream=stream, current_stream=lambda device: current
    ):
        chain = Chain(torch.device("cuda", 1))
        assert chain.after(Work(), start) == "work"
        assert chain.after(None, start) == "work"
        # The rank's own shard gets nothing, but it may send as an owner.
        scatter = Work()
        assert chain.after(scatter, lambda: None) is scatter
        assert chain.after(None, lambda: None) is None
    waits = "second stream waits for the stream of the step"
    launches = "the second stream launches"
    behind_scatter = [waits, "the second stream waits for the scatter"]
    assert log == [*behind_scatter, launches, waits, launches, *behind_scatter, waits]
