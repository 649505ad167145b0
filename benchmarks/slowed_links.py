# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives that take as long as the links of the cost model would."""

import threading
import time
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.plan.cost import CostModel


class Links:
    """Hold messages back until the link of this rank would have carried them."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        # As in the model, what replicas pass on does not slow messages down.
        self._links = {"messages": _Link(), "spread": _Link()}
        self._queues: dict[Any, SimpleQueue[Any]] = {}
        self._all_to_all = dist.all_to_all_single
        self._all_gather = dist.all_gather_into_tensor

    def all_to_all_single(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        receives: Any,
        sends: Any,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Launch, and let a thread wait; collectives of a group end in their order."""
        work = self._all_to_all(output, sent, receives, sends, group=group, async_op=True)
        if not async_op:
            return work.wait()
        # What a rank sends to itself does not leave it.
        stays = sends[dist.get_rank(group)] * sent.element_size()
        num_bytes = max(sent.nbytes, output.nbytes) - stays
        return self._hold(work, (group, "messages"), num_bytes * self._cost.seconds_per_byte(0, 0))

    def all_gather_into_tensor(
        self, output: torch.Tensor, sent: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Launch as above: what replicas pass on has an order of its own."""
        work = self._all_gather(output, sent, group=group, async_op=True)
        if not async_op:
            return work.wait()
        seconds = self._cost.all_gather_seconds(range(dist.get_world_size(group)), output.nbytes)
        return self._hold(work, (group, "spread"), seconds)

    def _hold(self, work: Any, channel: Any, seconds: float) -> "_Held":
        if channel not in self._queues:
            self._queues[channel] = SimpleQueue()
            queue = self._queues[channel]
            arguments = queue, self._links[channel[1]]
            threading.Thread(target=self._carry, args=arguments, daemon=True).start()
        done = threading.Event()
        self._queues[channel].put((work, seconds, done))
        return _Held(done)

    def _carry(self, queue: "SimpleQueue[Any]", link: Any) -> None:
        while True:
            work, seconds, done = queue.get()
            work.wait()
            # The model adds up what a rank sends or receives as an owner.
            link.carry(seconds).wait()
            done.set()


class _Link:
    """Carry one message at a time, in the order in which they come.

    A lock would not do: the thread that has just released it may get it again at once.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[float, threading.Event]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def carry(self, seconds: float) -> threading.Event:
        """Return what is set once a message that takes so long has been carried."""
        carried = threading.Event()
        self._queue.put((seconds, carried))
        return carried

    def _run(self) -> None:
        while True:
            seconds, carried = self._queue.get()
            time.sleep(seconds)
            carried.set()


class _Held:
    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def wait(self) -> None:
        """Wait until the link would have carried it."""
        self._done.wait()
