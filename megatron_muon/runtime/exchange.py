# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The collectives that move rows and results, and nothing else."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist


class AllToAll(NamedTuple):
    """Messages of one rank: exactly the rectangles, no padding.

    Args:
        group: Ranks that exchange.
        sends: Flat memory of sent elements, by receiver in the order of the group.
        receives: Flat memory of received elements, by sender in the same order.
        send_sizes: Elements by receiver.
        receive_sizes: Elements by sender.
    """

    group: dist.ProcessGroup
    sends: torch.Tensor
    receives: torch.Tensor
    send_sizes: list[int]
    receive_sizes: list[int]

    def start(self) -> dist.Work | None:
        """Launch it, and return a handle to wait for before received elements are read.

        Communication: one ``all_to_all_single`` with one message per peer.
        """
        # Over NCCL this runs on the group's own stream, after this stream has packed messages.
        # wait() makes the current stream wait; the host does not.
        return dist.all_to_all_single(
            self.receives,
            self.sends,
            self.receive_sizes,
            self.send_sizes,
            group=self.group,
            async_op=True,
        )


def connect(messages: Sequence[AllToAll]) -> None:
    """Send one element to every other rank that any message goes to.

    Communication: one ``all_to_all_single``, skipped if there are none.
    """
    if not messages:
        return
    group, device = messages[0].group, messages[0].sends.device
    sends = [int(any(sizes)) for sizes in zip(*(m.send_sizes for m in messages), strict=True)]
    receives = [int(any(s)) for s in zip(*(m.receive_sizes for m in messages), strict=True)]
    # A replica may have a message for itself.
    sends[dist.get_rank(group)] = receives[dist.get_rank(group)] = 0
    dist.all_to_all_single(
        torch.zeros(sum(receives), dtype=torch.float32, device=device),
        torch.zeros(sum(sends), dtype=torch.float32, device=device),
        receives,
        sends,
        group=group,
    )


class Sections(NamedTuple):
    """Results of a scatter that replicas pass on to each other.

    Args:
        group: The replicas of this rank's shard.
        all: Flat memory for the sections of all replicas, of one size, in the order of the group.
        own: This rank's section.
    """

    group: dist.ProcessGroup
    all: torch.Tensor
    own: torch.Tensor

    def start(self) -> dist.Work | None:
        """All-gather the sections in place; this rank's own one must be complete.

        All replicas skip it if they receive nothing.

        Communication: one ``all_gather_into_tensor`` over the group.
        """
        if not self.all.numel():
            return None
        return dist.all_gather_into_tensor(self.all, self.own, group=self.group, async_op=True)

    def connect(self) -> None:
        """Connect the replicas.

        Communication: one ``all_gather_into_tensor`` of one element a rank.
        """
        own = torch.zeros(1, dtype=torch.float32, device=self.all.device)
        gathered = own.new_empty(dist.get_world_size(self.group))
        dist.all_gather_into_tensor(gathered, own, group=self.group)


def wait(work: dist.Work | None) -> None:
    """Let the current stream wait for a collective; on gloo, the host."""
    if work is not None:
        work.wait()


class Chain:
    """Start collectives after others have ended, in the order of the calls.

    Replicas use this to all-gather results behind a scatter. If the step itself waited for the
    scatter on a GPU, it would lose time either way: a rank that waits early is idle, and one that
    waits late, after the Newton-Schulz of the next bucket, keeps its replicas waiting. A second
    stream waits. The host launches both collectives one after the other, in the same order on all
    ranks, so they may share a communicator.

    gloo has no streams: the host waits, in the same turn on all ranks of the plan.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after(
        self, work: dist.Work | None, start: Callable[[], dist.Work | None]
    ) -> dist.Work | None:
        """Start a collective when another one has ended.

        Args:
            work: The other one; None to wait for nothing.
            start: Launches the collective, and returns its handle; None if there is nothing to do.

        Returns:
            A handle of both, to be waited for before their memory is used; None for nothing.

        Communication: the collective that ``start`` launches.
        """
        stream: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            # A collective starts after earlier work of the stream that launches it. Earlier work
            # of the step on the memory must come before it too, even if ``work`` is None.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            stream = torch.cuda.stream(self._stream)
        with stream:
            wait(work)
            started = start()
        # The second one ends after the first. If there is none, the step itself must wait for the
        # first: the rank may still be sending.
        return work if started is None else started
