# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Move rectangles of rows between shards, messages and stacks: all of one list at once.

On a GPU one kernel moves a list, whatever its length; on a CPU torch's functions do. Both have the
same bits.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from megatron_muon.runtime.agreement import first_line

if TYPE_CHECKING:
    from megatron_muon.runtime.row_kernel import RowTable

logger = logging.getLogger(__name__)

# Source and target of a rectangle, (rows, cols), and the numbers of the tensors that they are views
# of; see Addresses.
type Move = tuple[torch.Tensor, torch.Tensor, int, int]


class Addresses:
    """Addresses of the tensors between which the kernel moves rows, for any number of lists.

    Tables of rectangles name tensors by number, and stay where tensors of the same strides move.

    Args:
        tensors: The first tensors; they may be of memory that is freed between steps.
        device: Where the kernel runs.
        by_kernel: Whether the kernel moves rows; None for ``uses_kernel()``.

    Attributes:
        tensors: By number.
        device: See above.
        by_kernel: See above.
        pointers: Addresses by number, ``(num_tensors,)`` int64 on the device.
    """

    pointers: torch.Tensor

    def __init__(
        self, tensors: Sequence[torch.Tensor], device: torch.device, by_kernel: bool | None = None
    ) -> None:
        self.device = device
        self.by_kernel = uses_kernel(device) if by_kernel is None else by_kernel
        self.tensors = list(tensors)
        self._known: list[int] = []
        self.update()

    def update(self) -> None:
        """Find where tensors are now, before a step moves rows: their memory must be allocated.

        Memory: if any tensor moved, one pinned block, and one copy on the device.
        """
        if not self.by_kernel:
            return
        # Tensors may move in every step, and seldom do: a copy costs more than the comparison.
        addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        if addresses != self._known:
            self._known = addresses
            self.pointers = _kernel().on_device(torch.tensor(addresses), self.device)


class RowMoves:
    """Rectangles that are moved together.

    Args:
        moves: The rectangles. All sources have one dtype and all targets another one, each float32
            or bfloat16. Views may be of memory that is freed between steps.
        addresses: Of the tensors that they are views of.
        norms: By move, the position of the norm that it is divided by; None for none. The quotient
            is computed in fp32, and rounded as it is written. With ``factors`` it is the position
            of a factor of its block, by which it is multiplied first.
        factors: By move, factors that it is multiplied by in fp32, one after the other; None for
            none. Their product would round differently.
        by_kernel: False where one side is in CPU memory.

    Memory: with the kernel about 100 bytes a rectangle, and 8 for every 4,096 elements.
    """

    _table: "RowTable | None" = None

    def __init__(
        self,
        moves: Sequence[Move],
        addresses: Addresses,
        *,
        norms: Sequence[int] | None = None,
        factors: Sequence[Sequence[float]] | None = None,
        by_kernel: bool = True,
    ) -> None:
        self._addresses, self._norms, self._factors = addresses, norms, factors
        self._by_kernel = by_kernel and addresses.by_kernel
        self.set(moves)

    def set(self, moves: Sequence[Move]) -> None:
        """Move these from now on; none, to drop the views, but not the table that needs none."""
        views = () if self._by_kernel else moves
        self._sources = [source for source, *_ in views]
        self._targets = [target for _, target, *_ in views]
        if self._by_kernel and moves:
            addresses = self._addresses
            self._table = _kernel().build_table(
                moves, addresses.tensors, self._norms, self._factors, addresses.device
            )

    def run(self, norms: torch.Tensor | None = None) -> None:
        """Move all of them.

        Args:
            norms: ``(num_norms,)`` float32, where rectangles have positions of norms.
        """
        if self._table is not None:
            _kernel().launch(self._table, self._addresses.pointers, norms)
        elif self._sources:
            self._run_by_torch(norms)

    def _run_by_torch(self, norms: torch.Tensor | None) -> None:
        if self._norms is None or self._factors is not None:
            # The copy converts to fp32 exactly, so factors round as in one pass.
            # To the device the host need not wait: nobody writes sources before the step has ended.
            to_gpu = self._targets[0].is_cuda
            torch._foreach_copy_(self._targets, self._sources, non_blocking=to_gpu)
            if self._norms is not None and norms is not None:
                own = norms[list(self._norms)].to(self._targets[0].device).unbind()
                torch._foreach_mul_(self._targets, list(own))
            for factors in zip(*(self._factors or ()), strict=True):
                if any(factor != 1.0 for factor in factors):
                    torch._foreach_mul_(self._targets, list(factors))
            return
        assert norms is not None
        for source, target, position in zip(self._sources, self._targets, self._norms, strict=True):
            source = source.to(target.device, non_blocking=True)
            # A slice, as a tensor without dimensions would not decide the dtype of the quotient.
            torch.div(source, norms[position : position + 1], out=target)


@functools.cache
def uses_kernel(device: torch.device) -> bool:
    """Return whether the kernel moves rows on a device: a GPU, or a CPU in Triton's interpreter.

    It is compared with torch first, which also compiles it. Where it differs or cannot be compiled,
    this rank logs it and calls torch instead: the results are the same.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    difference = difference_from_torch(device)
    if difference is not None:
        logger.warning("the kernel that moves rows is not used on %s: %s", device, difference)
    return difference is None


@functools.cache
def _kernel() -> ModuleType:
    # Importing Triton takes a second, which CPU ranks need not wait for.
    from megatron_muon.runtime import row_kernel

    return row_kernel


def difference_from_torch(device: torch.device) -> str | None:
    """Compare the kernel with torch's own functions, which also compiles it.

    Returns:
        What differs, or the error of the compiler; None where all bits are equal.
    """
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(96, 100, generator=generator) * torch.logspace(-30, 30, 100)
    wide = wide.to(device)
    narrow = wide.bfloat16()
    norms = torch.tensor([3.7, 0.2], device=device)
    for source, target, positions, factors in (
        (wide, narrow, (0, 1), None),
        (narrow, wide, None, ((0.3, 1.7), (0.9, 1.0))),
        (narrow, narrow, None, None),
        (wide, wide, None, ((0.3, 1.7), (0.9, 1.0))),
        (narrow, wide, (0, 1), ((0.3, 1.7), (0.9, 1.0))),
    ):
        found = []
        for by_kernel in (True, False):
            moved = torch.zeros_like(target)
            # Whole rows are moved as one long one, whose full tile takes wide loads; a slice of
            # columns row by row.
            moves = [
                (source[:48], moved[:48], 0, 1),
                (source[48:, 3:53], moved[48:, 3:53], 0, 1),
            ]
            try:
                addresses = Addresses([source, moved], device, by_kernel)
                RowMoves(moves, addresses, norms=positions, factors=factors).run(
                    norms if positions else None
                )
            # Compilers raise whatever they do.
            except Exception as error:
                return first_line(error)
            found.append(moved)
        if not torch.equal(*found):
            return f"{source.dtype} to {target.dtype}: other bits than torch's"
    return None
