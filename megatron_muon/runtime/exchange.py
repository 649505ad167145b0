# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The collectives that move rows and results, and nothing else.

Vocabulary:

==============  ================================================================================
row shard       the contiguous rows of a matrix that one rank holds, ``(local_rows, cols)``
all_gather      every rank receives every shard and assembles the whole matrix
gather          each owner receives the pieces of the matrices it owns
scatter         each holder receives the pieces of the results that it holds
message         the pieces that one rank sends to another at once
==============  ================================================================================
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_muon.plan.layout import RowLayout


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


class Rectangle(Protocol):
    """What is packed into a message: only its shape is looked at."""

    @property
    def num_rows(self) -> int:
        """Rows."""

    @property
    def num_cols(self) -> int:
        """Columns."""


class Messages[T: Rectangle](NamedTuple):
    """What one rank sends and receives in one collective, by rank of the job.

    Args:
        sends: For each receiver what it gets, in an order that both know.
        receives: For each sender what comes from it, in the same order.
        is_used: Whether any rank of the group has something to send.
    """

    sends: Mapping[int, Sequence[T]]
    receives: Mapping[int, Sequence[T]]
    is_used: bool


class Exchange[T: Rectangle]:
    """Send rectangles to other ranks and receive some, once for each bucket.

    Staging buffers are allocated once, two of each kind, and re-used by every other bucket: the
    messages of one bucket may travel while those of the one before are still being read. The caller
    must be done with bucket ``i`` when it packs bucket ``i + 2``.

    Args:
        group: Ranks that exchange; None where nothing travels.
        buckets: Messages of this rank for each bucket; a rank without any has empty ones.
        dtype: What travels.
        device: Where the buffers live.

    Communication: :meth:`start` is one ``all_to_all_single`` over the group: one message a peer,
        exactly the rectangles, no padding. Skipped on all ranks where a bucket is not used.
    Memory: twice the largest send and twice the largest receive of a bucket.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        buckets: Sequence[Messages[T]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group, self._buckets = group, buckets
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        self._sends, self._receives = (
            _Staging([getattr(bucket, kind) for bucket in buckets], ranks, dtype, device)
            for kind in ("sends", "receives")
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the staging buffers, bytes."""
        return self._sends.num_bytes + self._receives.num_bytes

    def packing(self, index: int) -> Sequence[tuple[T, torch.Tensor]]:
        """Return where each rectangle of a bucket must be written before :meth:`start`."""
        return self._sends.views[index]

    def start(self, index: int) -> dist.Work | None:
        """Send a bucket off, and return what to wait for before reading :meth:`unpacking`."""
        if not self._buckets[index].is_used:
            return None
        return dist.all_to_all_single(
            self._receives.flat(index),
            self._sends.flat(index),
            self._receives.split_sizes[index],
            self._sends.split_sizes[index],
            group=self._group,
            async_op=True,
        )

    def unpacking(self, index: int) -> Sequence[tuple[T, torch.Tensor]]:
        """Return where each rectangle of a bucket lies after it arrived."""
        return self._receives.views[index]


class _Staging[T: Rectangle]:
    """Two flat buffers, and where each rectangle of each bucket lies in them."""

    def __init__(
        self,
        buckets: Sequence[Mapping[int, Sequence[T]]],
        ranks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.split_sizes = [
            [sum(each.num_rows * each.num_cols for each in bucket.get(rank, ())) for rank in ranks]
            for bucket in buckets
        ]
        num_elements = max((sum(sizes) for sizes in self.split_sizes), default=0)
        self._buffers = [
            torch.empty(num_elements, dtype=dtype, device=device)
            for _ in range(min(2, len(buckets)))
        ]
        self.views: list[list[tuple[T, torch.Tensor]]] = []
        for index, bucket in enumerate(buckets):
            views, offset = [], 0
            for each in (each for rank in ranks for each in bucket.get(rank, ())):
                size = each.num_rows * each.num_cols
                flat = self._buffers[index % 2][offset : offset + size]
                views.append((each, flat.view(each.num_rows, each.num_cols)))
                offset += size
            self.views.append(views)

    @property
    def num_bytes(self) -> int:
        """Memory of both buffers, bytes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def flat(self, index: int) -> torch.Tensor:
        """View all rectangles of a bucket as they travel."""
        return self._buffers[index % 2][: sum(self.split_sizes[index])]
