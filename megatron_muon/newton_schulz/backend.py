# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The interface of Newton-Schulz backends."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


# Relative to the norm. On random matrices the error of bf16 steps is about 0.005
# (docs/performance.md), and kernels sum in another order. The error of a wrong kernel is about 1.
_MAX_DIFFERENCE = 0.05


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
        reference: For kernels that are not torch's, the backend whose results they must match, up
            to rounding; see ``check()``.
        is_batched: Whether all matrices of a stack share its launches.
        workspace: Memory that a call needs beside its stack, at most: tensors of the size of the
            stack, its result included, and tensors of n x n a matrix, n the shorter side.
    """

    name: ClassVar[str]
    reference: ClassVar["type[Backend] | None"] = None
    is_batched: ClassVar[bool] = True
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

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether it can run on a shape, shorter side first, in ``num_parts`` parts."""
        return True

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Return the requirements that a job does not meet, as sentences."""
        return []

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

    def check(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> None:
        """Run on random matrices, and compare with the reference.

        It runs once for each shape at construction, which also compiles the kernels.

        Args:
            stack: Stack of the shape, dtype and device to run on; its values are overwritten.
            args: Arguments of the stack, without a group of parts.

        Raises:
            RuntimeError: The results differ by more than rounding.
        """
        import torch

        if self.reference is None:
            return
        # Its own generator: Megatron's must be in the same state on tensor-parallel ranks.
        generator = torch.Generator(stack.device).manual_seed(0)
        std = math.prod(args.whole_shape) ** -0.5
        drawn = stack.normal_(std=std, generator=generator)
        actual = self.run(drawn, args).float()
        expected = self.reference().run(drawn, args).float()
        difference = float((actual - expected).norm() / expected.norm())
        # Also true if a result is NaN.
        if not difference <= _MAX_DIFFERENCE:
            other = self.reference.name
            shape = " x ".join(map(str, stack.shape[1:]))
            raise RuntimeError(
                f"Newton-Schulz {self.name}: expected a relative error below {_MAX_DIFFERENCE} "
                f"against {other} for {shape} matrices, got {difference:.2g}. Use "
                f"exchange.newton_schulz {other}, and report it with the versions of the kernels."
            )
