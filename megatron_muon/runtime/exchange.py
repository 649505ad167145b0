# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The collectives that move rows and results, and nothing else."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.plan.layout import RowLayout
from megatron_muon.plan.routes import Route


def all_gather_rows(
    local_rows: torch.Tensor, layout: RowLayout, group: dist.ProcessGroup
) -> torch.Tensor:
    """Assemble a whole matrix on every rank from the row shards of all.

    Shards are padded to the largest one on the wire; the padding is trimmed by the layout. Ranks
    with an empty shard still take part.

    Args:
        local_rows: This rank's shard, ``(local_rows, cols)``, any dtype; ``local_rows`` may be 0.
        layout: Row shards of all ranks of ``group``.
        group: Group that the matrix is sharded over.

    Returns:
        The whole matrix ``(rows, cols)``, contiguous, same dtype and bits as the shards.

    Raises:
        ValueError: The shard's shape differs from the layout.

    Communication: one ``all_gather_into_tensor``; sends ``max_shard_rows * cols`` elements to each
        of the other ranks. Megatron-FSDP's shards are uneven, so much of it may be padding: the
        matrix times ``world * max_shard_rows / rows``.
    Memory: ``world * max_shard_rows * cols`` elements until it returns, and the matrix.
    """
    rank = dist.get_rank(group)
    expected = (layout.shard_rows(rank), layout.num_cols)
    if tuple(local_rows.shape) != expected:
        raise ValueError(
            f"all_gather_rows: expected a shard of shape {expected} on rank {rank} of the group, "
            f"got {tuple(local_rows.shape)}. Rebuild the optimizer after the model was resharded."
        )
    # all_gather_into_tensor needs equal sizes. What the padding holds never matters.
    padded = local_rows.new_empty(layout.max_shard_rows, layout.num_cols)
    padded[: local_rows.shape[0]].copy_(local_rows)
    gathered = local_rows.new_empty(len(layout.shards), *padded.shape)
    dist.all_gather_into_tensor(gathered.view(-1, layout.num_cols), padded, group=group)
    matrix = local_rows.new_empty(layout.num_rows, layout.num_cols)
    for shard, (start, stop) in zip(gathered, layout.shards, strict=True):
        matrix[start:stop].copy_(shard[: stop - start])
    return matrix


def all_reduce_norms(squares: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up the squared norms of all ranks, in place.

    Args:
        squares: Sum of squares of this rank's rows of every block, ``(num_blocks,)``, float64.
        group: Ranks that hold rows.

    Communication: one all-reduce of 8 bytes a block.
    """
    dist.all_reduce(squares, group=group)


class BucketMessages(NamedTuple):
    """What one rank sends and receives in one collective, by rank of the job.

    Args:
        sends: For each receiver its routes, in an order that both know.
        receives: For each sender its routes, in the same order.
        is_used: Whether any rank of the group has something to send.
    """

    sends: Mapping[int, Sequence[Route]]
    receives: Mapping[int, Sequence[Route]]
    is_used: bool


class Exchange:
    """Send the routes of one bucket after the other, and receive others.

    Args:
        group: Ranks that exchange; None where nothing travels.
        buckets: Messages of this rank for each bucket; a rank without any has empty ones.
        sends: For each bucket, flat memory for what is sent, as many elements as its routes have.
        receives: The same for what is received. Memory of different buckets may overlap where the
            caller is done with one before it starts the other.

    Communication: :meth:`start` is one ``all_to_all_single`` over the group: one message for each
        peer, exactly the rectangles, no padding. All ranks leave it out where a bucket is not used.
    """

    _is_used: list[bool]  # by bucket
    _sends: "list[_Messages]"
    _receives: "list[_Messages]"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        buckets: Sequence[BucketMessages],
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
    ) -> None:
        self._group = group
        self._is_used = [bucket.is_used for bucket in buckets]
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        self._sends = [
            _Messages.of(bucket.sends, ranks, memory)
            for bucket, memory in zip(buckets, sends, strict=True)
        ]
        self._receives = [
            _Messages.of(bucket.receives, ranks, memory)
            for bucket, memory in zip(buckets, receives, strict=True)
        ]

    def connect(self) -> None:
        """Send one element to each rank that any bucket sends to.

        Communication: one ``all_to_all_single``, left out where no bucket is used.
        """
        if not any(self._is_used):
            return
        sends, receives = _peers(self._sends), _peers(self._receives)
        device = self._sends[0].flat.device
        dist.all_to_all_single(
            torch.zeros(sum(receives), device=device),
            torch.zeros(sum(sends), device=device),
            receives,
            sends,
            group=self._group,
        )

    def packing(self, index: int) -> Sequence[tuple[Route, torch.Tensor]]:
        """Return where each route of a bucket must be written before :meth:`start`."""
        return self._sends[index].views

    def start(self, index: int) -> dist.Work | None:
        """Launch a bucket, and return what to wait for before reading :meth:`unpacking`."""
        if not self._is_used[index]:
            return None
        sends, receives = self._sends[index], self._receives[index]
        # Over NCCL this runs on the group's own stream, after what this stream has packed.
        # wait() makes the current stream wait; the host does not.
        return dist.all_to_all_single(
            receives.flat,
            sends.flat,
            receives.split_sizes,
            sends.split_sizes,
            group=self._group,
            async_op=True,
        )

    def unpacking(self, index: int) -> Sequence[tuple[Route, torch.Tensor]]:
        """Return where each route of a bucket lies after it arrived."""
        return self._receives[index].views


class _Messages(NamedTuple):
    """All messages of one bucket in one direction, as they lie in memory.

    Args:
        flat: All of them, one behind the other in the order of the group.
        split_sizes: Elements of each.
        views: Each route, ``(num_rows, num_cols)``.
    """

    flat: torch.Tensor
    split_sizes: list[int]
    views: list[tuple[Route, torch.Tensor]]

    @classmethod
    def of(
        cls, by_peer: Mapping[int, Sequence[Route]], ranks: Sequence[int], flat: torch.Tensor
    ) -> "_Messages":
        """Lay the routes out; views are made once, not in front of every copy."""
        views, offset = [], 0
        # In the order of the group: all_to_all_single sends consecutive ranges.
        for route in (route for rank in ranks for route in by_peer.get(rank, ())):
            memory = flat[offset : offset + route.num_elements]
            views.append((route, memory.view(route.num_rows, route.num_cols)))
            offset += route.num_elements
        sizes = [sum(route.num_elements for route in by_peer.get(rank, ())) for rank in ranks]
        return cls(flat, sizes, views)


def _peers(buckets: Sequence[_Messages]) -> list[int]:
    """Return 1 for each rank of the group at the other end of a message, otherwise 0."""
    sizes = zip(*(messages.split_sizes for messages in buckets), strict=True)
    return [int(any(of_rank)) for of_rank in sizes]
