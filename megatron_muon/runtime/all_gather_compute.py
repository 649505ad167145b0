# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Every matrix on every rank: the simple way, kept as a reference."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from megatron_muon.runtime.agreement import raise_where_ranks_differ
from megatron_muon.runtime.exchange import all_gather_rows
from megatron_muon.runtime.local_rows import Rows
from megatron_muon.runtime.sharded_matrix import ShardedMatrix


class AllGatherCompute:
    """Gather matrices to all ranks of their shard group, which all orthogonalize them.

    Args:
        matrices: Row shards by parameter, in the same order on all ranks.
        orthogonalize_whole: Returns the scaled orthogonal matrix of a parameter, ``(rows, cols)``
            float32, from its whole momentum. It joins tensor-parallel ranks itself.
        device: Where shards live.

    Raises:
        RuntimeError: On all ranks, when ranks of a shard group hold different parameters or
            layouts.

    Communication: at construction one hash per shard group. :meth:`orthogonalize` is one
        :func:`all_gather_rows` per matrix, and what ``orthogonalize_whole`` does.
    Memory: nothing between steps; in a step the whole matrix, and what Newton-Schulz needs for it.
    """

    staging_bytes = 0  # nothing is laid out for it

    def __init__(
        self,
        matrices: Mapping[torch.Tensor, ShardedMatrix],
        orthogonalize_whole: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._matrices = matrices
        self._orthogonalize_whole = orthogonalize_whole
        self._no_rows = torch.empty(0, device=device)
        groups = {m.shard_group: None for m in matrices.values() if m.shard_group is not None}
        # In parameter order, which is the same on all ranks of a group.
        for group in groups:
            entries = [
                f"{matrix.fqn} {matrix.layout}"
                for matrix in matrices.values()
                if matrix.shard_group is group
            ]
            raise_where_ranks_differ(entries, group, device, "Muon parameters")

    @torch.no_grad()
    def orthogonalize(
        self, momentum: Rows, results: Rows, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Orthogonalize all matrices; see :meth:`Engine.orthogonalize`."""
        if meanwhile is not None:
            meanwhile()
        for param, matrix in self._matrices.items():
            # Ranks without rows join.
            rows = momentum.get(param)
            if rows is None:
                rows = self._no_rows.new_empty(0, matrix.layout.num_cols)
            group = matrix.shard_group
            if group is not None and dist.get_world_size(group) > 1:
                rows = all_gather_rows(rows, matrix.layout, group)
            # Every rank of the group has computed the same matrix, and keeps its own rows.
            start, stop = matrix.local_range
            whole = self._orthogonalize_whole(param, rows)
            if param in results:
                results[param].copy_(whole[start:stop])
                yield [param]

    def forget(self) -> None:
        """Drop nothing: see :meth:`Engine.forget`."""

    def free(self) -> None:
        """Return nothing: no memory is laid out."""

    def memory_problems(self, other_bytes: int = 0) -> list[str]:
        """Return nothing: no memory is laid out."""
        return []
