# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Frobenius norms of blocks, summed in float64, so that they do not depend on the shards.

fp32 sums would differ in the last bits with the number of shards. float64 sums differ too, but by
so little that the norm, rounded to fp32, practically never does (docs/numerics.md).
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Route
from megatron_muon.runtime.exchange import all_reduce_norms
from megatron_muon.runtime.newton_schulz import EPSILON
from megatron_muon.runtime.scratch import in_shard

# Elements that a CPU converts to float64 at once: 2 MB, which stays in its second-level cache, in
# few calls.
_CHUNK_ELEMENTS = 2**18


class SumOfSquares:
    """Add up squares in float64.

    Args:
        device: Where the tensors live.

    Memory: 2 MB on a CPU, for converting a chunk at a time; a GPU does it in one fused pass.
    """

    def __init__(self, device: torch.device) -> None:
        num_elements = _CHUNK_ELEMENTS if device.type == "cpu" else 0
        self._scratch = torch.empty(num_elements, dtype=torch.float64, device=device)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a float64 scalar for each tensor: ``(rows, cols)``, float32, any strides."""
        if self._scratch.numel() == 0:
            norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64) if tensors else ()
            return [norm.square_() for norm in norms]
        return [self._sum(tensor) for tensor in tensors]

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in tensor.split(max(1, _CHUNK_ELEMENTS // tensor.shape[1])):
            for chunk in rows.split(_CHUNK_ELEMENTS, dim=1):
                flat = self._scratch[: chunk.numel()]
                flat.view(chunk.shape).copy_(chunk)
                total += torch.dot(flat, flat)
        return total


class BlockNorms:
    """Norms of all blocks of a plan, from the rows that each rank holds.

    In a step: :meth:`add` for each of :attr:`matrices`, :meth:`reduce`, :meth:`of` for each route,
    :meth:`clear`.

    Args:
        plan: The plan, equal on all ranks of the group.
        indices: Matrices whose blocks need a norm, the same on all ranks.
        rank: This rank of the job.
        group: Ranks of the plan; None where this rank is alone.
        device: Where shards live.

    Communication: :meth:`reduce` is one all-reduce of 8 bytes a block.
    Memory: 8 bytes a block, and that of :class:`SumOfSquares`.
    """

    _first: list[int]  # position of the first block of each matrix among all blocks
    _routes: dict[int, list[Route]]  # by matrix: whose squares this rank adds up
    _positions: torch.Tensor  # of the block of each of these routes, int64
    _sums: list[torch.Tensor]  # float64 scalars, one for each route
    _values: tuple[torch.Tensor, ...]  # fp32 scalars, one for each block

    def __init__(
        self,
        plan: ExchangePlan,
        indices: Iterable[int],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._first = [0]
        for matrix in plan.matrices:
            self._first.append(self._first[-1] + len(matrix.blocks))
        self._routes = {}
        for index in indices:
            if rank in plan.matrices[index].ranks:
                # Replicas hold the same rows: the first of them counts.
                mine = [route for route in plan.routes(index) if route.holders[0] == rank]
                if mine:
                    self._routes[index] = mine
        self._positions = torch.tensor(
            [self._position(route) for routes in self._routes.values() for route in routes],
            dtype=torch.int64,
            device=device,
        )
        self._sum_of_squares = SumOfSquares(device)
        self.clear()

    def _position(self, route: Route) -> int:
        return self._first[route.matrix] + route.block

    @property
    def matrices(self) -> Iterable[int]:
        """Matrices whose rows this rank must add, in order."""
        return self._routes.keys()

    def add(self, index: int, rows: torch.Tensor) -> None:
        """Add the squares of this rank's rows of a matrix, ``(local_rows, cols)`` float32."""
        views = [in_shard(rows, route) for route in self._routes[index]]
        self._sums += self._sum_of_squares(views)

    def reduce(self) -> None:
        """Add up the squares of all ranks, and take roots."""
        squares = torch.zeros(self._first[-1], dtype=torch.float64, device=self._device)
        if self._sums:
            squares.index_add_(0, self._positions, torch.stack(self._sums))
        if self._group is not None:
            all_reduce_norms(squares, self._group)
        # Clamped as emerging-optimizers does: a matrix of zeros stays zero.
        self._values = squares.sqrt_().clamp_min_(EPSILON).float().unbind()

    def of(self, route: Route) -> torch.Tensor:
        """Return the norm of a route's block, a float32 scalar on the device."""
        return self._values[self._position(route)]

    def clear(self) -> None:
        """Free what one step has added up."""
        self._sums = []
        self._values = ()
