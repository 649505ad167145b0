# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The interface of Newton-Schulz backends."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class NewtonSchulzArgs:
    """Arguments of Newton-Schulz of a stack of matrices.

    Args:
        settings: Steps, coefficients and precision.
        whole_shape: Shape of the whole matrices; differs from the stack's only for split matrices.
        is_normalized: Whether the norm of a whole matrix is 1. The stack is then bfloat16,
            otherwise float32.
        parts_group: Ranks that hold the parts of the single matrix of the stack; None if matrices
            are whole.
    """

    settings: NewtonSchulzSettings
    whole_shape: tuple[int, int]
    is_normalized: bool
    parts_group: "dist.ProcessGroup | None" = None

    @property
    def is_tall(self) -> bool:
        """Whether the whole matrix is tall; a part of it may be wide."""
        return self.whole_shape[0] > self.whole_shape[1]


@dataclass(frozen=True)
class FlopCount:
    """Operations, products and all-reduces of Newton-Schulz of one part of a matrix.

    Args:
        flops: Floating-point operations.
        num_products: Matrix products; at least one kernel per product.
        num_all_reduces: All-reduces of an n x n matrix if several owners split the matrix.
    """

    flops: float
    num_products: int
    num_all_reduces: int


class Backend(ABC):
    """A way to compute Newton-Schulz.

    Attributes:
        name: Its name in flags.
        workspace: Memory that a call needs beside its stack, at most: tensors of the size of the
            stack, its result included, and tensors of n x n a matrix, n the shorter side.
    """

    name: ClassVar[str]
    workspace: ClassVar[tuple[int, int]] = (3, 3)

    @abstractmethod
    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> FlopCount:
        """Count the work of one owner.

        Args:
            n: Shorter side of the whole matrix.
            m: Longer side of the whole matrix.
            segments: Steps between restarts; their sum is the number of steps.
            num_parts: Number of owners, which hold equal parts of the longer side.
        """

    def workspace_bytes(self, stack: "torch.Tensor", whole_shape: tuple[int, int]) -> int:
        """Return the memory that ``run()`` needs beside a stack of matrices or parts, at most."""
        stacks, squares = self.workspace
        # A part of a matrix may be shorter than the matrix, whose Gram matrix it has.
        num_elements = stacks * stack.numel() + squares * stack.shape[0] * min(whole_shape) ** 2
        return num_elements * self.item_bytes(stack)

    def item_bytes(self, stack: "torch.Tensor") -> int:
        """Return the bytes of an element while a stack is orthogonalized."""
        return stack.dtype.itemsize

    @abstractmethod
    def run(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
        """Orthogonalize a stack, ``(num_matrices, rows, cols)``.

        Returns:
            Same shape and dtype, in new memory; bf16-valued with ``settings.is_bf16``.

        Communication: with ``parts_group`` an all-reduce of the norm unless the stack is
            normalized, and the all-reduces of ``n * n`` elements that ``work()`` counts.
        """
