# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Start one collective as soon as another has ended, while the rank goes on with its step.

Replicas pass results on so. To wait for a scatter in the step itself would cost time either way: a
rank that waits early stands still, and one that waits late, behind the Newton-Schulz of the next
bucket, keeps its replicas waiting.

On a GPU a second stream waits. The host launches both collectives one behind the other, in one
order on all ranks, so that they may share a communicator. gloo knows no streams: a thread waits. It
launches at a time that differs between ranks, and so needs a process group for itself.
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


class Relay(ABC):
    """Start collectives behind others, in the order in which they come."""

    @abstractmethod
    def after(self, work: dist.Work | None, start: Start) -> Waitable | None:
        """Start a collective when another one has ended.

        Communication: what ``start`` launches.

        Args:
            work: What it waits for; None for nothing.
            start: Launches it, and returns what to wait for; None where it has nothing to do.

        Returns:
            What to wait for before the memory of either is used; None for nothing. What ``start``
            raises is raised there at the latest.
        """


def relay_on(device: torch.device) -> Relay:
    """Return what relays collectives of a device's backend."""
    return ThreadRelay() if device.type == "cpu" else StreamRelay(device)


class StreamRelay(Relay):
    """A second stream of a GPU waits; the host does not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def after(self, work: dist.Work | None, start: Start) -> Waitable | None:
        """Let the second stream wait; see :meth:`Relay.after`."""
        # A collective starts behind the stream that launches it. What the step has done with the
        # memory so far must be behind it too, also where there is nothing to wait for.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()
            started = start()
        # What starts behind the first one ends after it. Where nothing does, the step itself has to
        # wait: the rank may still send.
        return work if started is None else started


class ThreadRelay(Relay):
    """A thread waits. The process group that it launches in must be its own.

    Where a start fails, replicas wait for what this rank never launches, until its connection
    breaks or the process group's timeout ends.
    """

    def __init__(self) -> None:
        self._last: Future[dist.Work | None] | None = None

    def after(self, work: dist.Work | None, start: Start) -> Waitable | None:
        """Let a thread wait; see :meth:`Relay.after`."""
        before, started = self._last, Future[dist.Work | None]()
        self._last = started

        def relay() -> None:
            """Wait for the one before, so that all ranks launch in one order."""
            try:
                # Where it failed, nothing may follow: other ranks would take it for the failed one.
                if before is not None and (error := before.exception()) is not None:
                    raise error
                if work is not None:
                    work.wait()
                started.set_result(start())
            # Raised in the step, where it is waited for.
            except BaseException as error:
                started.set_exception(error)

        # As a daemon: a rank that fails should end, and not wait for messages that will never come.
        thread = threading.Thread(target=relay, daemon=True)
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
