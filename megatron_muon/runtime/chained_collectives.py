# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Start one collective as soon as another has ended, while the rank goes on with its step.

Replicas use this to all-gather results without blocking the step. If the step itself waited for a
scatter, it would lose time either way: a rank that waits early is idle, and one that waits late,
after the Newton-Schulz of the next bucket, keeps its replicas waiting.

On a GPU a second stream waits. The host launches both collectives one after the other, in the same
order on all ranks, so they may share a communicator. gloo has no streams: a thread waits. It
launches at a time that differs between ranks, and so needs a process group of its own.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch
import torch.distributed as dist

type Start = Callable[[], dist.Work | None]


class Waitable(Protocol):
    """What can be waited for, like :class:`torch.distributed.Work`."""

    def wait(self) -> object:
        """Let the current stream wait for it; on gloo, the host."""


class CollectiveChain(ABC):
    """Start collectives after others, in the order of the calls."""

    @abstractmethod
    def after(self, work: dist.Work | None, start: Start) -> Waitable | None:
        """Start a collective when another one has ended.

        Communication: what ``start`` launches.

        Args:
            work: The other one; None to wait for nothing.
            start: Launches the collective, and returns what to wait for; None if nothing.

        Returns:
            What to wait for before the memory of either is used; None for nothing. What ``start``
            raises is raised there at the latest.
        """


def chain_on(device: torch.device) -> CollectiveChain:
    """Return the chain for the backend of a device."""
    return ThreadChain() if device.type == "cpu" else StreamChain(device)


class StreamChain(CollectiveChain):
    """A second stream of a GPU waits; the host does not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after(self, work: dist.Work | None, start: Start) -> Waitable | None:
        """Let the second stream wait; see :meth:`CollectiveChain.after`."""
        # A collective starts after what its stream has done. What the step has done with the memory
        # must come before it too, even if there is nothing to wait for.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()
            started = start()
        # The second one ends after the first. If there is none, the step itself must wait for the
        # first: the rank may still be sending.
        return work if started is None else started


class ThreadChain(CollectiveChain):
    """A thread waits. It needs a process group of its own.

    If a start fails, replicas wait for a collective that this rank never launches, until its
    connection breaks or the timeout of the process group ends.
    """

    def __init__(self) -> None:
        self._last: Future[dist.Work | None] | None = None

    def after(self, work: dist.Work | None, start: Start) -> Waitable | None:
        """Let a thread wait; see :meth:`CollectiveChain.after`."""
        before, started = self._last, Future[dist.Work | None]()
        self._last = started

        def wait_and_start() -> None:
            """Wait for the call before, so that all ranks launch in the same order."""
            try:
                # If it failed, nothing may follow: other ranks would take it for the failed one.
                if before is not None and (error := before.exception()) is not None:
                    raise error
                if work is not None:
                    work.wait()
                started.set_result(start())
            # Raised in the step, where it is waited for.
            except BaseException as error:
                started.set_exception(error)

        # One thread per call, which ends by itself. A daemon: a rank that fails must end instead of
        # waiting for messages that never come.
        thread = threading.Thread(target=wait_and_start, daemon=True)
        thread.start()
        return _Started(started, thread)


class _Started:
    def __init__(self, started: Future[dist.Work | None], thread: threading.Thread) -> None:
        self._started = started
        self._thread = thread

    def wait(self) -> None:
        """Wait until the collective has been launched, for it, and for the end of its thread.

        If a daemon thread waits for the GIL in C++ when the interpreter ends, the process aborts.
        The last thing this one does is to let go of the collectives, whose destructors wait so.
        """
        work = self._started.result()
        self._thread.join()
        if work is not None:
            work.wait()
