# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Second moments of blocks, the state of NorMuon and NAMO, on the ranks of a plan."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.routes import Part


class Moments:
    """State values that a method keeps per block, of all blocks of a plan: one float32 vector.

    Args:
        matrices: Of the plan, equal on all ranks.
        shape_of: Shape of a block's state, by its rows and columns.
        group: Ranks of the plan; None for a rank alone.
        device: Device of the values.
        by_owner: Whether only the owner of a block updates its values.

    Attributes:
        values: Values of all blocks, ``(num_values,)`` float32.

    Memory: 4 bytes a value on every rank of the plan, and 8 more on the owner of the block.
    """

    values: torch.Tensor

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        shape_of: Callable[[int, int], tuple[int, int]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        by_owner: bool,
    ) -> None:
        self.matrices, self._shape_of, self._group = matrices, shape_of, group
        self.by_owner = by_owner
        self._first: dict[tuple[int, int], int] = {}
        self._ends = [0]
        end = 0
        for index, matrix in enumerate(matrices):
            shapes = [shape_of(*block) for block in matrix.blocks]
            # Blocks with a value per column come last: these values are contiguous then.
            for block in sorted(range(len(shapes)), key=lambda i: shapes[i][0] < shapes[i][1]):
                self._first[index, block] = end
                end += math.prod(shapes[block])
            self._ends.append(end)
        self.values = torch.zeros(end, device=device)
        # Values that other ranks update.
        self._is_remote = torch.ones(end, dtype=torch.bool, device=device)

    def first(self, matrix: int, block: int) -> int:
        """Return the position of the first value of a block."""
        return self._first[matrix, block]

    def range_of(self, matrix: int, num_matrices: int = 1) -> tuple[int, int]:
        """Return the range of the values of consecutive matrices."""
        return self._ends[matrix], self._ends[matrix + num_matrices]

    def claim(self, stack: Sequence[Part]) -> torch.Tensor:
        """Register this rank as the owner of a stack's values.

        Args:
            stack: Whole blocks of one shape.

        Returns:
            Indices of the values, ``(num_matrices, *state_shape)`` int64.
        """
        rows, cols = stack[0].num_rows, stack[0].num_cols
        firsts = [self._first[part.matrix, part.block] for part in stack]
        shape = self._shape_of(rows, cols)
        index = torch.tensor(firsts)[:, None] + torch.arange(math.prod(shape))
        index = index.view(-1, *shape).to(self.values.device)
        self._is_remote[index] = False
        return index

    def all_reduce_owned(self) -> None:
        """Copy the values of their owners to all ranks of the plan; collective.

        After each step, so that a state is never out of date, and saving it is no collective.

        Communication: one all-reduce of 4 bytes a value, if owners update them.
        """
        if self._group is not None and self.by_owner:
            dist.all_reduce(self.values.masked_fill_(self._is_remote, 0.0), group=self._group)

    def all_reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        """Replace the values by a reduction over the ranks of the plan; collective.

        Args:
            values: ``(num_values,)`` float32 of this rank, zeros for values that it lacks.
            operation: Reduction.

        Communication: one all-reduce of 4 bytes a value.
        """
        if self._group is not None:
            dist.all_reduce(values, operation, self._group)
        self.values.copy_(values)
