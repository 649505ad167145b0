# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives that take as long as the links of the cost model would."""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.plan.cost import CostModel


class Links:
    """Hold messages back until the links of this rank and of those that send would carry them."""

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
        if not async_op:
            return self._all_to_all(output, sent, receives, sends, group=group)
        rank = dist.get_rank(group)
        # What a rank sends to itself does not leave it.
        stays = sends[rank] * sent.element_size()
        num_bytes = max(sent.nbytes, output.nbytes) - stays
        seconds = torch.tensor([num_bytes * self._cost.seconds_per_byte(0, 0)])
        of_ranks = torch.empty(dist.get_world_size(group))
        works = [
            self._all_gather(of_ranks, seconds, group=group, async_op=True),
            self._all_to_all(output, sent, receives, sends, group=group, async_op=True),
        ]
        sources = [i for i, received in enumerate(receives) if received and i != rank]
        return self._hold(works, (group, "messages"), float(seconds), of_ranks, sources)

    def all_gather_into_tensor(
        self, output: torch.Tensor, sent: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Launch as above: what replicas pass on has an order of its own."""
        work = self._all_gather(output, sent, group=group, async_op=async_op)
        if not async_op:
            return work
        seconds = self._cost.all_gather_seconds(range(dist.get_world_size(group)), output.nbytes)
        return self._hold([work], (group, "spread"), seconds)

    def _hold(
        self,
        works: Sequence[Any],
        channel: Any,
        seconds: float,
        of_ranks: torch.Tensor | None = None,
        sources: Sequence[int] = (),
    ) -> "_Held":
        """Hold a collective back.

        Args:
            works: What has been launched.
            channel: The group, and the kind of link.
            seconds: Of this rank's messages over its link.
            of_ranks: The same of each rank of the group, once all have launched.
            sources: Ranks that send to this one.
        """
        if channel not in self._queues:
            self._queues[channel] = SimpleQueue()
            queue = self._queues[channel]
            arguments = queue, self._links[channel[1]]
            threading.Thread(target=self._carry, args=arguments, daemon=True).start()
        done = threading.Event()
        self._queues[channel].put((works, seconds, of_ranks, sources, done))
        return _Held(done)

    def _carry(self, queue: "SimpleQueue[Any]", link: Any) -> None:
        while True:
            works, seconds, of_ranks, sources, done = queue.get()
            for work in works:
                work.wait()
            start = time.perf_counter()
            link.carry(seconds).wait()
            # Rows are here when those that send them have sent all that they send.
            sent = max((float(of_ranks[source]) for source in sources), default=0.0)
            time.sleep(max(0.0, start + sent - time.perf_counter()))
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
