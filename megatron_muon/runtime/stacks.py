# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the parts that a rank owns lie in memory."""

import math
from collections.abc import Iterator, Sequence

import torch

from megatron_muon.plan.rank_plan import OwnedStacks, Stack
from megatron_muon.plan.routes import Route


class StackLayout:
    """Lay stacks end to end in flat memory.

    Args:
        owned: Stacks of one bucket, or of one group of local matrices.
        sizes: Matrices that each stack has room for, padding included.
    """

    kept: tuple[Route, ...]  # routes of which this rank is owner and holder
    num_elements: int  # of all stacks, padding included
    _shapes: list[tuple[int, int, int]]  # (size, rows, cols) of each stack
    _offsets: list[int]  # first element of each stack, and the end of the last
    _position: dict[tuple[int, int], tuple[int, int]]  # (matrix, block) -> (stack, index in it)

    def __init__(self, owned: OwnedStacks, sizes: Sequence[int]) -> None:
        self.kept = owned.kept
        self._stacks = owned.stacks
        self._shapes = []
        self._offsets = [0]
        self._position = {}
        for number, (stack, size) in enumerate(zip(owned.stacks, sizes, strict=True)):
            for index, part in enumerate(stack):
                self._position[part.matrix, part.block] = (number, index)
            shape = (size, stack[0].num_rows, stack[0].num_cols)
            self._shapes.append(shape)
            self._offsets.append(self._offsets[-1] + math.prod(shape))
        self.num_elements = self._offsets[-1]

    def stacks(self, memory: torch.Tensor) -> Iterator[tuple[Stack, torch.Tensor]]:
        """Yield each stack with its tensor ``(size, rows, cols)``; padding may hold anything."""
        for number, stack in enumerate(self._stacks):
            yield stack, self._tensor(memory, number)

    def _tensor(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        start, stop = self._offsets[number : number + 2]
        return memory[start:stop].view(self._shapes[number])

    def place(self, memory: torch.Tensor, route: Route) -> torch.Tensor:
        """View where a route belongs in the stacks, ``(num_rows, num_cols)``."""
        number, index = self._position[route.matrix, route.block]
        return _in_part(self._tensor(memory, number)[index], route)

    def result(self, results: Sequence[torch.Tensor], route: Route) -> torch.Tensor:
        """View a route in the orthogonalized stacks, ``(num_rows, num_cols)``."""
        number, index = self._position[route.matrix, route.block]
        return _in_part(results[number][index], route)

    def kept_results(self, results: Sequence[torch.Tensor]) -> list[tuple[Route, torch.Tensor]]:
        """View the results that stay on this rank."""
        return [(route, self.result(results, route)) for route in self.kept]


def _in_part(part: torch.Tensor, route: Route) -> torch.Tensor:
    return part[route.row : route.row + route.num_rows, route.col : route.col + route.num_cols]
