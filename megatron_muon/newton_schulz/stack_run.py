# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz of a stack that arrives and leaves portion by portion.

A portion is some lines of each matrix: columns of a wide one, rows of a tall one. Gram matrices are
sums over lines, and each line is multiplied alone. So the first product of Newton-Schulz can be
taken of the lines that are there, and the last one can be taken of those that are to leave next.
Between the two all lines are needed. Sums over portions round differently than sums over all lines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.call import Call

if TYPE_CHECKING:
    import torch


class StackRun(ABC):
    """One stack on its way.

    :meth:`add` each portion, :meth:`iterate`, then :meth:`finish` each portion.

    Attributes:
        result: Memory of the results, ``(num_matrices, rows, cols)``; there after :meth:`iterate`.
            A portion of it is valid once it has been finished.
    """

    result: "torch.Tensor"

    @abstractmethod
    def add(self, portion: int) -> None:
        """Take the first product of a portion, whose lines have arrived."""

    @abstractmethod
    def iterate(self) -> None:
        """Take everything between the first product and the last one.

        Communication: as :meth:`Backend.run` where owners split the matrix.
        """

    @abstractmethod
    def finish(self, portion: int) -> None:
        """Take the last product of a portion."""


class WholeRun(StackRun):
    """A stack that waits for all its lines, and leaves when all are done.

    Args:
        run: Orthogonalizes it, see :meth:`Backend.run`.
        stack: ``(num_matrices, rows, cols)``.
        call: What it is orthogonalized as.
    """

    def __init__(
        self,
        run: Callable[["torch.Tensor", Call], "torch.Tensor"],
        stack: "torch.Tensor",
        call: Call,
    ) -> None:
        self._orthogonalize = run
        self._stack = stack
        self._call = call

    def add(self, portion: int) -> None:
        """Do nothing."""

    def iterate(self) -> None:
        """Orthogonalize the stack."""
        self.result = self._orthogonalize(self._stack, self._call).contiguous()

    def finish(self, portion: int) -> None:
        """Do nothing."""


class PortionedRun(StackRun):
    """A stack of which the first and the last product are taken portion by portion.

    Args:
        stack: ``(num_matrices, rows, cols)``.
        call: What it is orthogonalized as.
        borders: First line of each portion, and the end.

    Memory: from the first :meth:`add` to :meth:`iterate` an n x n matrix in fp32 for each matrix.
        From there on an n x n matrix for each, what the last product multiplies, and the results,
        which are each as large as the stack. A bucket has all of its stacks on their way at once.
    """

    # Lines of the matrices are columns here, (num_matrices, n, lines).
    _x: "torch.Tensor"  # what the last product multiplies, once the steps before it are taken

    def __init__(self, stack: "torch.Tensor", call: Call, borders: Sequence[int]) -> None:
        import torch

        self._stack = stack
        self._call = call
        self._borders = borders
        n = min(call.whole_shape)
        # Of the first product. In 16 bits it would be rounded once for each portion.
        self._sum = torch.zeros(len(stack), n, n, device=stack.device)

    @abstractmethod
    def _take(self, portion: int) -> "torch.Tensor":
        """Return the lines of a portion that has arrived, in the dtype they are multiplied in."""

    @abstractmethod
    def _steps(self) -> None:
        """Take the steps that begin with the first Gram matrix; the stack is not read again."""

    @abstractmethod
    def _last_product(self, x: "torch.Tensor") -> "torch.Tensor":
        """Multiply some lines, ``(num_matrices, n, lines)``."""

    def add(self, portion: int) -> None:
        """Add to the first Gram matrix; see :meth:`StackRun.add`."""
        x = self._take(portion)
        self._sum += x @ x.mT

    def iterate(self) -> None:
        """Take all steps, but for the last product; see :meth:`StackRun.iterate`."""
        import torch

        self._steps()
        self.result = torch.empty_like(self._stack)

    def finish(self, portion: int) -> None:
        """Take the last product; see :meth:`StackRun.finish`."""
        lines = self._last_product(self._portion(self._x, portion))
        self._portion(self._lines(self.result), portion).copy_(lines)

    def _first_gram(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Return the sum of all portions, ``(num_matrices, n, n)``, and drop it in fp32."""
        gram = self._sum.to(dtype)
        del self._sum
        return gram

    def _lines(self, stack: "torch.Tensor") -> "torch.Tensor":
        return stack.mT if self._call.is_tall else stack

    def _portion(self, x: "torch.Tensor", portion: int) -> "torch.Tensor":
        return x[..., self._borders[portion] : self._borders[portion + 1]]
