# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The collectives that move rows and results, and nothing else."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.plan.routes import Route


def all_gather_rows(
    local_rows: torch.Tensor, rows: Mapping[int, tuple[int, int]], group: dist.ProcessGroup
) -> torch.Tensor:
    """Assemble a whole matrix on every rank from the rows of all.

    Shards are padded to the size of the largest one. Ranks with an empty shard still take part.

    Args:
        local_rows: This rank's rows, ``(local_rows, cols)``, any dtype; ``local_rows`` may be 0.
        rows: Rows ``(start, stop)`` by rank of the job; those that hold none may be missing.
        group: Ranks that hold all rows together.

    Returns:
        The whole matrix ``(rows, cols)``, contiguous, same dtype and bits as the shards.

    Communication: one ``all_gather_into_tensor``; sends as many rows as the largest shard has to
        every other rank. Megatron-FSDP's shards are uneven, so much of it may be padding.
    Memory: as many rows for each rank until it returns, and the matrix.
    """
    ranges = [rows.get(rank, (0, 0)) for rank in dist.get_process_group_ranks(group)]
    num_cols = local_rows.shape[1]
    # all_gather_into_tensor needs equal sizes. What the padding holds never matters.
    padded = local_rows.new_empty(max(stop - start for start, stop in ranges), num_cols)
    padded[: local_rows.shape[0]].copy_(local_rows)
    gathered = local_rows.new_empty(len(ranges), *padded.shape)
    dist.all_gather_into_tensor(gathered.view(-1, num_cols), padded, group=group)
    matrix = local_rows.new_empty(max(stop for _, stop in ranges), num_cols)
    for shard, (start, stop) in zip(gathered, ranges, strict=True):
        matrix[start:stop].copy_(shard[: stop - start])
    return matrix


class BucketMessages(NamedTuple):
    """Messages of one rank in one collective, by rank of the job.

    Args:
        sends: The routes to every receiver, in an order that both know.
        receives: The elements from every sender.
        is_used: Whether any rank of the group has something to send.
    """

    sends: Mapping[int, Sequence[Route]]
    receives: Mapping[int, int]
    is_used: bool


# A route, and its rectangle in memory, (num_rows, num_cols).
type RouteView = tuple[Route, torch.Tensor]


def route_view(route: Route, flat: torch.Tensor, offset: int) -> RouteView:
    """View a route, row by row, from an element of flat memory on."""
    memory = flat[offset : offset + route.num_elements]
    return route, memory.view(route.num_rows, route.num_cols)


def consecutive_views(routes: Sequence[Route], flat: torch.Tensor) -> list[RouteView]:
    """View routes one after the other, from the beginning of flat memory on."""
    ends = itertools.accumulate((route.num_elements for route in routes), initial=0)
    return [route_view(route, flat, offset) for route, offset in zip(routes, ends, strict=False)]


class Exchange:
    """Send and receive the messages of one bucket or scatter after the other.

    Args:
        group: Ranks that exchange; None for a rank alone.
        messages: This rank's messages in every collective; may be empty.
        sends: Flat memory for what is sent, per collective, with as many elements as its routes.
        receives: The same for what is received, by sender in the order of the group. Memory may
            overlap if the caller is done with one collective before it starts the other.

    Attributes:
        packing: By collective, where routes must be written before ``start()``.

    Communication: ``start()`` is one ``all_to_all_single`` over the group with one message per
        peer: exactly the rectangles, no padding. All ranks skip it if it is not used.
    """

    packing: list[list[RouteView]]
    # All by collective; sizes also by rank of the group.
    _is_used: list[bool]
    _sends: list[torch.Tensor]
    _receives: list[torch.Tensor]
    _send_sizes: list[list[int]]
    _receive_sizes: list[list[int]]

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        messages: Sequence[BucketMessages],
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
    ) -> None:
        self._group = group
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        self._is_used = [each.is_used for each in messages]
        self._sends = list(sends)
        self._receives = list(receives)
        self._send_sizes = [
            [sum(r.num_elements for r in each.sends.get(rank, ())) for rank in ranks]
            for each in messages
        ]
        self._receive_sizes = [[each.receives.get(rank, 0) for rank in ranks] for each in messages]
        # Views are made once, not before every copy. In the order of the group: all_to_all_single
        # sends consecutive ranges.
        self.packing = [
            consecutive_views([r for rank in ranks for r in each.sends.get(rank, ())], flat)
            for each, flat in zip(messages, sends, strict=True)
        ]

    def connect(self) -> None:
        """Send one element to every other rank that any message goes to.

        Communication: one ``all_to_all_single``, skipped if nothing is used.
        """
        if not any(self._is_used):
            return
        # One element for every rank at the other end of a message.
        sends, receives = (
            [int(any(sizes)) for sizes in zip(*collectives, strict=True)]
            for collectives in (self._send_sizes, self._receive_sizes)
        )
        # A replica may have a message for itself.
        sends[dist.get_rank(self._group)] = receives[dist.get_rank(self._group)] = 0
        device = self._sends[0].device
        dist.all_to_all_single(
            torch.zeros(sum(receives), device=device),
            torch.zeros(sum(sends), device=device),
            receives,
            sends,
            group=self._group,
        )

    def start(self, index: int) -> dist.Work | None:
        """Launch a collective, and return what to wait for before reading what is received."""
        if not self._is_used[index]:
            return None
        # Over NCCL this runs on the group's own stream, after what this stream has packed.
        # wait() makes the current stream wait; the host does not.
        return dist.all_to_all_single(
            self._receives[index],
            self._sends[index],
            self._receive_sizes[index],
            self._send_sizes[index],
            group=self._group,
            async_op=True,
        )


class ReplicaAllGather:
    """All-gather between replicas what they have received in a scatter.

    Args:
        group: The replicas of this rank's shard.
        sections: Flat memory for the sections of all replicas, per scatter, in the order of the
            group and of the same size. This rank's own section is complete when the all-gather
            starts.

    Attributes:
        own_sections: By scatter, this rank's section.

    Communication: ``start()`` is one ``all_gather_into_tensor`` over the group, in place. All
        replicas skip it if they receive nothing.
    """

    own_sections: list[torch.Tensor]
    _all: list[torch.Tensor]  # by scatter, the sections of all replicas

    def __init__(self, group: dist.ProcessGroup, sections: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._all = list(sections)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.own_sections = [
            section.chunk(size)[rank] if section.numel() else section for section in self._all
        ]

    def connect(self) -> None:
        """Connect the replicas.

        Communication: one ``all_gather_into_tensor`` of one element a rank.
        """
        own = torch.zeros(1, device=self._all[0].device)
        dist.all_gather_into_tensor(
            own.new_empty(dist.get_world_size(self._group)), own, group=self._group
        )

    def start(self, index: int) -> dist.Work | None:
        """Launch the all-gather of a scatter, and return what to wait for."""
        if not self._all[index].numel():
            return None
        return dist.all_gather_into_tensor(
            self._all[index], self.own_sections[index], group=self._group, async_op=True
        )


class Later(NamedTuple):
    """A collective that starts when it is waited for, once another one has ended.

    Args:
        work: The other one; None for nothing.
        start: Launches the collective.
    """

    work: dist.Work | None
    start: Callable[[], dist.Work | None]

    def wait(self) -> None:
        """Wait for the other one, then start this one and wait for it."""
        wait(self.work)
        wait(self.start())


def wait(work: dist.Work | Later | None) -> None:
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

    gloo has no streams: the second collective starts when the step waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after(
        self, work: dist.Work | None, start: Callable[[], dist.Work | None]
    ) -> dist.Work | Later | None:
        """Start a collective when another one has ended.

        Args:
            work: The other one; None to wait for nothing.
            start: Launches the collective, and returns its handle; None if there is nothing to do.

        Returns:
            A handle of both, to be waited for before their memory is used; None for nothing.

        Communication: the collective that ``start`` launches.
        """
        if self._stream is None:
            return Later(work, start)
        # A collective starts after what its stream has done. What the step has done with the memory
        # must come before it too, even if there is nothing to wait for.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            wait(work)
            started = start()
        # The second one ends after the first. If there is none, the step itself must wait for the
        # first: the rank may still be sending.
        return work if started is None else started
