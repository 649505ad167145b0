# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Move rectangles of rows between shards, messages and stacks: all of one table at once.

On a GPU one kernel moves a table, whatever its length; on a CPU torch's functions do. Both have the
same bits.
"""

import functools
import logging
import operator
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_muon.plan.rank_plan import Move
from megatron_muon.runtime.agreement import first_line

if TYPE_CHECKING:
    from megatron_muon.runtime.row_kernel import RowTable

logger = logging.getLogger(__name__)

# Identifies the rows that this rank holds of a matrix: a parameter, or part of one.
type Handle = Hashable
# These rows, (local_rows, cols) float32.
type Rows = Mapping[Handle, torch.Tensor]


class Tensors:
    """The tensors between which rows are moved, by number; all tables of an engine share them.

    Args:
        memory: Number 0, bytes for messages and stacks; it may be freed between steps.
        rows_device: Device of shards.
        by_kernel: Whether the kernel moves rows; None for ``uses_kernel()``.

    Attributes:
        by_number: The tensors; shards follow the memory.
        device: Device of messages and stacks.
        rows_device: Device of shards.
        by_kernel: Whether the kernel moves rows.
        table: Address, row stride and column stride by number, int64 on the device.
    """

    table: torch.Tensor

    def __init__(
        self, memory: torch.Tensor, rows_device: torch.device, by_kernel: bool | None = None
    ) -> None:
        self.device, self.rows_device = memory.device, rows_device
        self.by_kernel = uses_kernel(memory.device) if by_kernel is None else by_kernel
        self._known: tuple[list[int], list[tuple[int, ...]]] = ([], [])
        self.by_number = [memory]
        self.bind(())

    def bind(self, shards: Sequence[torch.Tensor]) -> None:
        """Move these shards from now on; none, to drop the ones of a step."""
        self.by_number[1:] = shards
        self._strides = list(map(torch.Tensor.stride, self.by_number))

    def update(self) -> None:
        """Read the addresses of the tensors before a step moves rows; their memory is allocated.

        Memory: if any tensor moved, one pinned block, and one copy on the device.
        """
        if not self.by_kernel:
            return
        # Tensors seldom move between steps, and a comparison costs less than a copy.
        known = list(map(torch.Tensor.data_ptr, self.by_number)), self._strides
        if known != self._known:
            self._known = known
            entries = [
                (address, strides[0], strides[-1]) for address, strides in zip(*known, strict=True)
            ]
            self.table = _kernel().on_device(torch.tensor(entries), self.device)


class Side(NamedTuple):
    """Sources or targets of the moves of a table.

    Args:
        dtype: Their dtype, float32 or bfloat16.
        first_number: Added to the numbers of tensors.
        first_byte: Added to columns, once divided by the bytes of an element.
    """

    dtype: torch.dtype
    first_number: int = 0
    first_byte: int = 0


class RowMoves:
    """Rectangles that are moved together.

    Args:
        moves: The moves of a plan.
        source: Side of all sources.
        target: Side of all targets.
        tensors: The tensors of all plans.
        factors: By block, two factors of targets, which are multiplied one after the other; None
            for none.

    Attributes:
        moves: The moves, in the numbers of ``tensors``.
        completed: Handles of the shards that are complete when these moves end.

    Memory: with the kernel 96 bytes a move, and 8 for every 4,096 elements.
    """

    _table: "RowTable | None" = None

    def __init__(
        self,
        moves: Sequence[Move],
        source: Side,
        target: Side,
        tensors: Tensors,
        factors: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        added = []
        for side in (source, target):
            added += [side.first_number, 0, side.first_byte // side.dtype.itemsize, 0]
        self.moves = [(*map(operator.add, move, added), *move[8:]) for move in moves]
        self.completed: list[Handle] = []
        self._dtypes, self._tensors = (source.dtype, target.dtype), tensors
        self._factors = None if factors is None else [factors[move[-1]] for move in moves]
        # The kernel moves rows within one device. Shards, with numbers above 0, may be elsewhere.
        is_here = tensors.rows_device == tensors.device or not any(moves[0][0:8:4] if moves else ())
        if moves and is_here and tensors.by_kernel:
            self._table = _kernel().build_table(
                self.moves, self._factors, self._dtypes, tensors.device
            )

    def run(self, divisors: torch.Tensor | None = None) -> None:
        """Move all of them. Values are scaled in float32, and rounded as they are written.

        Args:
            divisors: Norms by block, float32; None for none.
        """
        if self._table is not None:
            _kernel().launch(self._table, self._tensors.table, divisors)
        elif self.moves:
            self._run_by_torch(divisors)

    def _run_by_torch(self, divisors: torch.Tensor | None) -> None:
        tensors = self._tensors.by_number
        target_device = tensors[self.moves[0][4]].device
        # To the device the host need not wait: nobody writes sources before the step has ended.
        to_gpu = target_device.type == "cuda"
        sources, targets = (
            [
                _rectangle(tensors[move[at]].view(dtype), move[at + 1 : at + 4], move[8:10])
                for move in self.moves
            ]
            for at, dtype in zip((0, 4), self._dtypes, strict=True)
        )
        if divisors is not None:
            for source, target, move in zip(sources, targets, self.moves, strict=True):
                source = source.to(target_device, non_blocking=True)
                # A slice, as a tensor without dimensions would not decide the dtype of a quotient.
                torch.div(source, divisors[move[-1] : move[-1] + 1], out=target)
            return
        # The copy converts to float32 exactly, so factors round as in one pass.
        torch._foreach_copy_(targets, sources, non_blocking=to_gpu)
        for factors in zip(*(self._factors or ()), strict=True):
            if any(factor != 1.0 for factor in factors):
                torch._foreach_mul_(targets, list(factors))


def _rectangle(tensor: torch.Tensor, place: Move, shape: Move) -> torch.Tensor:
    """View one side of a move, ``(num_rows, num_cols)``."""
    row, col, row_stride = place
    own_stride, col_stride = tensor.stride(0), tensor.stride(-1)
    first = tensor.storage_offset() + row * own_stride + col * col_stride
    return tensor.as_strided(shape, (row_stride or own_stride, col_stride), first)


@functools.cache
def uses_kernel(device: torch.device) -> bool:
    """Return whether the kernel moves rows on a device: a GPU that Triton can compile it for.

    It is tried now: a rank that fails in a step leaves the others in a collective. A rank without
    a compiler, as in runtime images of CUDA, logs it and calls torch: the results are the same.
    """
    if device.type != "cuda":
        return False
    try:
        tensors = Tensors(
            torch.zeros(2, dtype=torch.float32, device=device), device, by_kernel=True
        )
        tensors.update()
        move = (0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0)
        RowMoves([move], Side(torch.float32), Side(torch.float32), tensors).run()
    # Any exception: compilers raise their own.
    except Exception as error:
        logger.warning("no kernel moves rows on %s: %s", device, first_line(error))
        return False
    return True


@functools.cache
def _kernel() -> ModuleType:
    # Importing Triton takes a second, which CPU ranks need not wait for.
    from megatron_muon.runtime import row_kernel

    return row_kernel
