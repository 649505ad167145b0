# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Views of the parts that a rank owns, in the memory of its stacks."""

import math
from dataclasses import dataclass

import torch

from megatron_muon.newton_schulz.backend import Backend
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.standard import Standard, batch_on_cpu
from megatron_muon.plan.rank_plan import OwnedStacks, Stack
from megatron_muon.plan.routes import Route


@dataclass
class StackCall:
    """A stack, and how it is orthogonalized.

    Args:
        tensor: ``(num_matrices, rows, cols)``.
        backend: What does it.
        call: How.
        owners: Ranks that do it together.
    """

    tensor: torch.Tensor
    backend: Backend
    call: Call
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        """Choose how many matrices are orthogonalized in one call; on a GPU all of them."""
        self._batch_size = len(self.tensor)
        if self.tensor.device.type == "cpu" and self._batch_size > 1:
            is_known = self.backend.name == Standard.name
            self._batch_size = batch_on_cpu(*self.tensor.shape) if is_known else 1

    def run(self) -> None:
        """Replace the matrices by their results."""
        # One stack after the other: results of all would need as much memory again. It also
        # makes those of tall matrices contiguous, which are transposed views.
        for stack in self.tensor.split(self._batch_size):
            stack.copy_(self.backend.run(stack, self.call))


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
