# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One collective starts when another one has ended, while the rank goes on."""

import threading
import time
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon.runtime.chained_collectives import StreamChain, ThreadChain, chain_on


class _Work:
    """What is waited for until the test lets it end."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name
        self.ended = threading.Event()

    def wait(self) -> None:
        assert self.ended.wait(timeout=60)
        self._log.append(f"waited for {self._name}")


def _start(log: list[str], name: str, work: Any = None) -> Any:
    def start() -> Any:
        log.append(f"started {name}")
        return work

    return start


def test_thread_starts_each_behind_what_it_waits_for_in_their_order():
    """The second one has to wait for the first one, though its own scatter ended before."""
    log: list[str] = []
    first, second, passed_on = (_Work(log, name) for name in ("first", "second", "passed on"))
    chain = chain_on(torch.device("cpu"))
    started = [
        chain.after(first, _start(log, "after first", passed_on)),
        chain.after(second, _start(log, "after second")),
        chain.after(None, _start(log, "after nothing")),
    ]
    assert log == []  # the rank goes on
    second.ended.set()
    passed_on.ended.set()
    first.ended.set()
    for each in reversed(started):
        each.wait()
    assert log == [
        "waited for first",
        "started after first",
        "waited for second",
        "started after second",
        "started after nothing",
        "waited for passed on",
    ]


def test_thread_has_ended_when_its_collective_has():
    """It let go of collectives while the interpreter ended, in C++, which aborted the process."""
    threads: list[threading.Thread] = []

    class Kept(_Work):
        """The last reference to it is the thread's, which needs a while to let go."""

        def wait(self) -> None:
            threads.append(threading.current_thread())
            super().wait()

        def __del__(self) -> None:
            time.sleep(0.2)

    work = Kept([], "first")
    relayed, ended = ThreadChain().after(work, lambda: None), work.ended
    del work
    ended.set()
    relayed.wait()
    assert [thread.is_alive() for thread in threads] == [False]


def test_error_of_a_thread_is_raised_in_the_step_and_stops_what_follows():
    """Other ranks would take the next collective for the one that was never launched."""

    def fails() -> None:
        raise RuntimeError("connection closed by peer")

    log: list[str] = []
    chain = ThreadChain()
    for started in (chain.after(None, fails), chain.after(None, _start(log, "what follows"))):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            started.wait()
    assert log == []


def test_second_stream_waits_for_the_step_and_for_the_work_before_it_starts():
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
        chain = chain_on(torch.device("cuda", 1))
        assert isinstance(chain, StreamChain)
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
