# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The Gram form of a split matrix, its n x n products shared out among the owners.

Splitting divides the longer side. The n x n iteration would be repeated on every owner, which for
several owners is most of the work. Here each owner computes its rows of each n x n matrix, and
what the next product needs whole is all-gathered.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import Work
from megatron_muon.newton_schulz.gram import Gram, num_square_products

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class GramShared(Gram):
    """Each owner has n / num_parts rows of P, Q and R."""

    name = "gram_shared"

    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> Work:
        """Count what :class:`Gram` does, divided by the owners, and what they gather.

        A segment gathers P in each step, R in all but the last, and Q at the end. In a segment of
        one step Q is made of P, which is there.
        """
        num_square = num_square_products(segments)
        flops = (4 * m * n * n * len(segments) + 2 * n**3 * num_square) / num_parts
        num_gathers = sum(2 * steps - (steps == 1) for steps in segments)
        return Work(flops, 2 * len(segments) + num_square, len(segments), num_gathers)

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether the matrix is split, and every owner has as many rows."""
        return num_parts > 1 and n % num_parts == 0

    def _rows(
        self, matrix: "torch.Tensor", parts_group: "dist.ProcessGroup | None"
    ) -> "torch.Tensor":
        import torch.distributed as dist

        if parts_group is None:
            return matrix
        return matrix.chunk(dist.get_world_size(parts_group), dim=1)[dist.get_rank(parts_group)]

    def _whole(
        self, rows: "torch.Tensor", parts_group: "dist.ProcessGroup | None"
    ) -> "torch.Tensor":
        import torch
        import torch.distributed as dist

        if parts_group is None:
            return rows
        # The stack of a split matrix holds one.
        num_cols = rows.shape[2]
        whole = torch.empty(1, num_cols, num_cols, dtype=rows.dtype, device=rows.device)
        dist.all_gather_into_tensor(whole[0], rows[0].contiguous(), group=parts_group)
        return whole
