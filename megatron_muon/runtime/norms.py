# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Frobenius norms of blocks, summed in float64, so that they do not depend on the shards.

fp32 sums would differ in the last bits with the number of shards. float64 sums differ too, but the
norm, rounded to fp32, practically never does (docs/numerics.md).
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.standard import least_norm
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.runtime.agreement import own_rank

# Elements that a CPU converts to float64 at once: 2 MB, which stay in the second-level cache of a
# core. More in one sum would also cost digits. A GPU converts as it adds.
_PIECE_ELEMENTS = 2**18


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums, ``(num_tensors,)`` float64; tensors are ``(rows, cols)`` float32."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square_()


class BlockNorms:
    """Norms of all blocks of a plan, from the rows of all ranks.

    Args:
        plan: The plan.
        group: Ranks of the plan; None for a rank alone.
        device: Device of the all-reduce.
        rows_device: Where rows are.

    Communication: ``reduce()`` is one all-reduce of 8 bytes a block.
    Memory: 8 bytes a block, and in a step 4 more and 3 MB on a CPU.
    """

    values: torch.Tensor  # (num_blocks,) float32, once reduced

    def __init__(
        self,
        plan: ExchangePlan,
        group: dist.ProcessGroup | None,
        device: torch.device,
        rows_device: torch.device,
    ) -> None:
        self._group, self._device, rank = group, device, own_rank()
        # Pieces of this rank's rows, block by block: number of the shard, first local row, number
        # of rows. The squares of a piece are summed at once.
        self._pieces: list[tuple[int, int, int]] = []
        lengths: list[int] = []
        num_held = 0
        for matrix in plan.matrices:
            by_block: list[list[tuple[int, int, int]]] = [[] for _ in matrix.blocks]
            is_held = rank in matrix.elements_by_rank
            # Regions, not routes, which are cut at the borders of parts: the norm of a slice of
            # columns would take a kernel of its own.
            for region in matrix.regions if is_held else ():
                # Replicas hold the same rows: the first of them counts.
                if region.holders[0] != rank:
                    continue
                end = region.local_row + region.num_rows
                most = region.num_rows
                if rows_device.type == "cpu":
                    most = max(1, _PIECE_ELEMENTS // region.num_cols)
                by_block[region.block] += [
                    (num_held, row, min(most, end - row))
                    for row in range(region.local_row, end, most)
                ]
            num_held += is_held
            self._pieces += itertools.chain(*by_block)
            lengths += map(len, by_block)
        self._lengths = torch.tensor(lengths, device=device)  # by block, number of its pieces
        self._rows: list[torch.Tensor] = []  # by piece
        self._squares = torch.zeros(len(lengths), dtype=torch.float64, device=device)

    def bind(self, shards: Sequence[torch.Tensor]) -> None:
        """View the rows whose norms are reduced.

        Args:
            shards: In the order of matrices, ``(local_rows, cols)`` float32; none to drop them.
        """
        self._rows = (
            [shards[number].narrow(0, row, rows) for number, row, rows in self._pieces]
            if shards
            else []
        )

    def reduce(self) -> None:
        """Add up the squares of all ranks, and compute the norms."""
        if self._rows:
            own = sums_of_squares(self._rows)
            own = own if own.device == self._device else own.to(self._device)
            # In one order: index_add_ adds by atomics on a GPU.
            sums = torch.segment_reduce(own, "sum", lengths=self._lengths, unsafe=True, initial=0)
            self._squares.copy_(sums)
        else:
            self._squares.zero_()
        if self._group is not None:
            dist.all_reduce(self._squares, group=self._group)
        # Clamped as emerging-optimizers does: a matrix of zeros stays zero.
        self.values = self._squares.sqrt_().clamp_min(least_norm()).float()
