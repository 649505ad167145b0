# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""fp32 memory for one shard at a time."""

import math
from collections.abc import Sequence

import torch

from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.routes import Route


class ShardScratch:
    """Two buffers of the largest shard of this rank, re-used for every matrix.

    Allocating one for each matrix would cost more than filling it.

    Args:
        matrices: Layouts of the plan.
        rank: This rank of the job.
        device: Where shards live.

    Memory: twice the largest local shard in fp32.
    """

    def __init__(self, matrices: Sequence[MatrixLayout], rank: int, device: torch.device) -> None:
        self._shapes: dict[int, tuple[int, int]] = {}
        for index, matrix in enumerate(matrices):
            for region in matrix.regions:
                if rank in region.holders:
                    # A shard may hold regions of several blocks: it ends where the last one ends.
                    rows, _ = self._shapes.get(index, (0, 0))
                    last = region.local_row + region.num_rows
                    self._shapes[index] = (max(rows, last), region.num_cols)
        # Two: one for the rows that a caller writes, one for the same rows normalized.
        num_elements = max(map(math.prod, self._shapes.values()), default=0)
        self.buffer = torch.empty(2, num_elements, dtype=torch.float32, device=device)

    def view(self, index: int, number: int = 0) -> torch.Tensor:
        """View one of the two buffers in the shape of this rank's shard of a matrix."""
        shape = self._shapes[index]
        return self.buffer[number, : math.prod(shape)].view(shape)


def in_shard(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """View a route in the shard of a holder, ``(local_rows, cols)``."""
    return rows[
        route.local_row : route.local_row + route.num_rows,
        route.local_col : route.local_col + route.num_cols,
    ]
