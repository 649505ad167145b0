# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Frobenius norms of blocks, summed in float64, so that they do not depend on the shards.

fp32 sums would differ in the last bits with the number of shards. float64 sums differ too, but the
norm, rounded to fp32, practically never does (docs/numerics.md).
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.normalize import least_norm
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Route
from megatron_muon.runtime.exchange import all_reduce_norms
from megatron_muon.runtime.stacks import in_shard

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

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sums, ``(num_tensors,)`` float64; tensors are ``(rows, cols)`` float32."""
        if not tensors:
            return self._scratch.new_zeros(0)
        if self._scratch.numel() == 0:
            return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square_()
        return torch.stack([self._sum(tensor) for tensor in tensors])

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in tensor.split(max(1, _CHUNK_ELEMENTS // tensor.shape[1])):
            for chunk in rows.split(_CHUNK_ELEMENTS, dim=1):
                flat = self._scratch[: chunk.numel()]
                flat.view(chunk.shape).copy_(chunk)
                total += torch.dot(flat, flat)
        return total


class BlockNorms:
    """Norms of all blocks of a plan, from the rows of all ranks.

    Args:
        plan: The plan.
        rank: This rank of the job.
        group: Ranks of the plan; None for a rank alone.
        device: Where shards are.

    Communication: :meth:`reduce` is one all-reduce of 8 bytes a block.
    Memory: 8 bytes a block while a step runs, and that of :class:`SumOfSquares`.
    """

    _first: list[int]  # positions of the first blocks of matrices among all blocks
    _routes: list[Route]  # whose squares this rank adds up
    _positions: torch.Tensor  # of the blocks of these routes, int64
    _values: torch.Tensor  # fp32, one per block, while a step runs

    def __init__(
        self,
        plan: ExchangePlan,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._first = [0]
        for matrix in plan.matrices:
            self._first.append(self._first[-1] + len(matrix.blocks))
        self._routes = [
            route
            for index, matrix in enumerate(plan.matrices)
            if rank in matrix.elements_by_rank
            for route in plan.routes(index, rank)
            # Replicas hold the same rows: the first of them counts.
            if route.holders[0] == rank
        ]
        positions = [self._position(route) for route in self._routes]
        self._positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self._sum_of_squares = SumOfSquares(device)

    def _position(self, route: Route) -> int:
        return self._first[route.matrix] + route.block

    def reduce(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Add up the squares of all ranks, and compute the norms.

        Args:
            rows: By matrix, this rank's rows ``(local_rows, cols)``, float32.
        """
        squares = torch.zeros(self._first[-1], dtype=torch.float64, device=self._device)
        sums = self._sum_of_squares([in_shard(rows[r.matrix], r) for r in self._routes])
        if self._routes:
            squares.index_add_(0, self._positions, sums)
        if self._group is not None:
            all_reduce_norms(squares, self._group)
        # Clamped as emerging-optimizers does: a matrix of zeros stays zero.
        self._values = squares.sqrt_().clamp_min_(least_norm()).float()

    def are_even(self, routes: Sequence[Route]) -> bool:
        """Return whether the blocks of some routes are one, or equally spaced in the plan."""
        positions = [self._position(route) for route in routes]
        distances = {
            after - before for before, after in zip(positions, positions[1:], strict=False)
        }
        return len(distances) <= 1 and min(distances, default=0) >= 0

    def of(self, routes: Sequence[Route]) -> torch.Tensor:
        """Return the norms of the blocks of even routes, float32 on the device.

        Returns:
            A scalar where all are of one block, otherwise ``(num_routes, 1, 1)``.
        """
        first, last = self._position(routes[0]), self._position(routes[-1])
        if first == last:
            return self._values[first]
        distance = (last - first) // (len(routes) - 1)
        return self._values[first : last + 1 : distance].view(-1, 1, 1)
