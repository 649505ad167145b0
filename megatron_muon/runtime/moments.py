# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""State of a method: a few numbers per block, of all blocks of a plan in one tensor.

Every rank of a plan has the tensor. If the owner of a block updates its numbers, other ranks learn
them at the end of the step.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.routes import Part


class Moments:
    """The numbers of all blocks of a plan.

    Args:
        matrices: Of the plan, equal on all ranks.
        shape_of: Shape of a block's state, by its rows and columns.
        group: Ranks of the plan; None for a rank alone.
        device: Where they are.
        by_owner: Whether the owner of a block alone updates its numbers.

    Memory: 4 bytes a number on every rank of the plan, and 8 more on the owner of the block.
    """

    values: torch.Tensor  # (num_values,) float32, block by block

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
            # Columns last: they are one piece then.
            for block in sorted(range(len(shapes)), key=lambda i: shapes[i][0] < shapes[i][1]):
                self._first[index, block] = end
                end += math.prod(shapes[block])
            self._ends.append(end)
        self.values = torch.zeros(end, device=device)
        # Numbers that other ranks update.
        self._is_foreign = torch.ones(end, dtype=torch.bool, device=device)

    def first(self, matrix: int, block: int) -> int:
        """Return where the numbers of a block begin."""
        return self._first[matrix, block]

    def range_of(self, matrix: int, num_matrices: int = 1) -> tuple[int, int]:
        """Return where the numbers of consecutive matrices begin and end."""
        return self._ends[matrix], self._ends[matrix + num_matrices]

    def own(self, stack: Sequence[Part]) -> torch.Tensor:
        """Return where the numbers of a stack of this rank are, ``(num_matrices, *state_shape)``.

        Args:
            stack: Whole blocks of one shape.
        """
        rows, cols = stack[0].num_rows, stack[0].num_cols
        firsts = [self._first[part.matrix, part.block] for part in stack]
        shape = self._shape_of(rows, cols)
        index = torch.tensor(firsts)[:, None] + torch.arange(math.prod(shape))
        index = index.view(-1, *shape).to(self.values.device)
        self._is_foreign[index] = False
        return index

    def share(self) -> None:
        """Let all ranks of the plan know what the owners have; called by all of them together.

        After each step, so that a state is never out of date, and saving it is no collective.

        Communication: one all-reduce of 4 bytes a number, if owners update them.
        """
        if self._group is not None and self.by_owner:
            dist.all_reduce(self.values.masked_fill_(self._is_foreign, 0.0), group=self._group)

    def combine(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        """Set the numbers to those of all ranks; called by all of them together.

        Args:
            values: ``(num_values,)``, zeros for the numbers of other ranks.
            operation: Of ``ReduceOp``.

        Communication: one all-reduce of 4 bytes a number, if owners update them.
        """
        if self._group is not None and self.by_owner:
            dist.all_reduce(values, operation, self._group)
            self.values.copy_(values)
