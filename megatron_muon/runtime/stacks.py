# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Views of the parts that a rank owns, in the memory of its stacks."""

import math

import torch

from megatron_muon.plan.rank_plan import OwnedStacks, Stack
from megatron_muon.plan.routes import Route


class StackBuffers:
    """Stacks of one bucket, or one stack of local matrices, end to end in flat memory.

    Args:
        owned: What they hold.
        memory: Flat, ``owned.num_elements``.
    """

    kept: tuple[Route, ...]  # routes whose owner and holder this rank is
    staying: tuple[Route, ...]  # of them, those whose results are not sent
    stacks: list[tuple[Stack, torch.Tensor]]  # with its tensor, (num_matrices, rows, cols)
    _position: dict[tuple[int, int], tuple[int, int]]  # (matrix, block) -> (stack, index in it)

    def __init__(self, owned: OwnedStacks, memory: torch.Tensor) -> None:
        self.kept = owned.kept
        self.staying = owned.staying
        self.stacks = []
        self._position = {}
        offset = 0
        for number, stack in enumerate(owned.stacks):
            shape = (len(stack), stack[0].num_rows, stack[0].num_cols)
            size = math.prod(shape)
            self.stacks.append((stack, memory[offset : offset + size].view(shape)))
            offset += size
            for index, part in enumerate(stack):
                self._position[part.matrix, part.block] = (number, index)

    def view(self, route: Route) -> torch.Tensor:
        """View a route in the stacks, ``(num_rows, num_cols)``."""
        number, index = self._position[route.matrix, route.block]
        return _in_part(self.stacks[number][1][index], route)


def in_shard(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """View a route in the shard of a holder, ``(local_rows, cols)``."""
    # Most are all of it, and a view is made for every route where rows move in every step.
    if (route.num_rows, route.num_cols) == rows.shape:
        return rows
    return rows[
        route.local_row : route.local_row + route.num_rows,
        route.local_col : route.local_col + route.num_cols,
    ]


def _in_part(part: torch.Tensor, route: Route) -> torch.Tensor:
    return part[route.row : route.row + route.num_rows, route.col : route.col + route.num_cols]
