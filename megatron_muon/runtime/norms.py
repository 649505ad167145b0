# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Frobenius norms of blocks, summed in float64, so that they do not depend on the shards.

fp32 sums would differ in the last bits with the number of shards. float64 sums differ too, but the
norm, rounded to fp32, practically never does (docs/numerics.md).
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.methods import Namo
from megatron_muon.newton_schulz.normalize import least_norm
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Route
from megatron_muon.runtime.exchange import all_reduce_norms
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.row_moves import STACK_ELEMENTS, equal_shapes

_SMALL = 2**12
# What a CPU converts to float64 at once. More in one sum would also cost digits. A GPU converts as
# it adds.
_PIECE_ELEMENTS = STACK_ELEMENTS


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums, ``(num_tensors,)`` float64; tensors are ``(rows, cols)`` float32."""
    # A stack costs a copy: it pays where a call for each takes longer.
    if tensors[0].is_cuda or max(map(torch.numel, tensors)) > _SMALL:
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square_()
    sums = torch.empty(len(tensors), dtype=torch.float64)
    for numbers in equal_shapes(tensors):
        rows = torch.stack([tensors[i] for i in numbers]).double()
        sums[list(numbers)] = rows.square_().sum((1, 2))
    return sums


class BlockNorms:
    """Norms of all blocks of a plan, from the rows of all ranks.

    Args:
        plan: The plan.
        rank: This rank of the job.
        group: Ranks of the plan; None for a rank alone.
        device: Of the all-reduce.
        rows_device: Where rows are.
        method: Needs the norms of gradients too; None for no method.
        moments: Its state.

    Communication: :meth:`reduce` is one all-reduce of 8 bytes a block, or 16 with a method.
    Memory: 8 or 16 bytes a block, and in a step 4 more and 3 MB on a CPU.
    """

    values: torch.Tensor  # (num_blocks,) float32, once reduced
    factors: torch.Tensor | None = None  # of results, likewise
    _first: list[int]  # positions of the first blocks of matrices among all blocks
    # Whose squares this rank adds up: matrix, first row of this rank's, number of rows; and the
    # positions of their blocks, int64.
    _pieces: list[tuple[int, int, int]]
    _positions: torch.Tensor
    _rows: list[torch.Tensor]  # of all pieces

    def __init__(
        self,
        plan: ExchangePlan,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        rows_device: torch.device,
        method: Namo | None = None,
        moments: Moments | None = None,
    ) -> None:
        self._group = group
        self._device = device
        self._method, self._moments = method, moments
        self._first = [0]
        for matrix in plan.matrices:
            self._first.append(self._first[-1] + len(matrix.blocks))
        self._pieces = []
        positions: list[int] = []
        # Regions, not routes, which are cut at the borders of parts: the norm of a slice of columns
        # would take a kernel of its own.
        for index, matrix in enumerate(plan.matrices):
            for region in matrix.regions if rank in matrix.elements_by_rank else ():
                # Replicas hold the same rows: the first of them counts.
                if region.holders[0] != rank:
                    continue
                end = region.local_row + region.num_rows
                most = region.num_rows
                if rows_device.type == "cpu":
                    most = max(1, _PIECE_ELEMENTS // region.num_cols)
                for row in range(region.local_row, end, most):
                    self._pieces.append((index, row, min(most, end - row)))
                    positions.append(self._first[index] + region.block)
        self._positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self._rows = []
        num_norms = 1 if method is None else 2
        # Of this rank, of what is orthogonalized and of gradients.
        self._squares = torch.zeros(num_norms, self._first[-1], dtype=torch.float64, device=device)

    def position(self, route: Route) -> int:
        """Return the position of a route's block in :attr:`values`."""
        return self._first[route.matrix] + route.block

    def view(self, rows: Mapping[int, torch.Tensor]) -> None:
        """View the rows whose norms are reduced.

        Args:
            rows: By matrix, this rank's rows ``(local_rows, cols)``, float32; none to drop them.
        """
        self._rows = self._cut(rows) if rows else []

    def _cut(self, rows: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        return [rows[index].narrow(0, row, num_rows) for index, row, num_rows in self._pieces]

    def see_gradients(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Sum the squares of gradients, if the method needs them, before a step overwrites them.

        Args:
            rows: By matrix, this rank's rows of gradients.
        """
        if self._method is not None:
            self._sum(1, self._cut(rows))

    def _sum(self, kind: int, rows: Sequence[torch.Tensor]) -> None:
        squares = self._squares[kind].zero_()
        if rows:
            own = sums_of_squares(rows)
            own = own if own.device == self._device else own.to(self._device)
            squares.index_add_(0, self._positions, own)

    def reduce(self) -> None:
        """Add up the squares of all ranks, and compute the norms."""
        self._sum(0, self._rows)
        if self._group is not None:
            all_reduce_norms(self._squares, self._group)
        norms = self._squares.sqrt_()
        if self._method is not None and self._moments is not None:
            update, gradient = norms.float()
            self.factors = self._method.factors(self._moments.values, gradient, update)
        # Clamped as emerging-optimizers does: a matrix of zeros stays zero.
        self.values = norms[0].clamp_min(least_norm()).float()
