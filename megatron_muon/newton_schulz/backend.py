# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.stack_run import StackRun

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class Work:
    """What Newton-Schulz of one part of a matrix takes.

    Args:
        flops: Floating-point operations.
        num_products: Matrix products, each at least one kernel.
        num_all_reduces: All-reduces of an n x n matrix, where several owners split the matrix.
    """

    flops: float
    num_products: int
    num_all_reduces: int


class Backend(ABC):
    """One way to compute Newton-Schulz.

    Attributes:
        name: What users call it.
        reference: Set for kernels that are not torch's: the backend whose results they must match,
            up to rounding. Both run once on each shape at construction, which also compiles the
            kernels before the first step. Copies of a matrix are left to the reference: a kernel
            that chooses its tiles by timing may have other bits on another rank.
        is_batched: Whether all matrices of a stack share its launches.
        timed_as: The backend whose measured times of whole matrices stand for it; None for its own.
        communicates: Whether its kernels do, so that owners of a split matrix must run together.
        takes_portions: Whether it has :meth:`start`.
    """

    name: ClassVar[str]
    reference: ClassVar[str | None] = None
    is_batched: ClassVar[bool] = True
    timed_as: ClassVar[str | None] = None
    communicates: ClassVar[bool] = False
    takes_portions: ClassVar[bool] = False

    @abstractmethod
    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> Work:
        """Count the work of one owner.

        Args:
            n: Shorter side of the whole matrix.
            m: Longer side of the whole matrix.
            segments: Steps between restarts; their sum is the number of steps.
            num_parts: Owners, each of which holds an equal part of the longer side.
        """

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether it can run on a shape, shorter side first, in so many parts."""
        return True

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """List what a job lacks for it, a sentence each."""
        return []

    def connect(self, parts_group: "dist.ProcessGroup") -> None:  # noqa: B027
        """Make what owners of split matrices need to run together, once at construction.

        All ranks of the group call it in the same order.

        Raises:
            RuntimeError: It cannot be made.
        """

    @abstractmethod
    def run(self, stack: "torch.Tensor", call: Call) -> "torch.Tensor":
        """Orthogonalize a stack, ``(num_matrices, rows, cols)``.

        Returns:
            Same shape and dtype, in new memory; bf16-valued where ``settings.is_bf16``.

        Communication: with ``parts_group`` an all-reduce of the norm where the stack is not
            normalized, and as many exchanges of ``n * n`` elements, n the shorter side, as
            :meth:`work` counts.
        """

    def start(self, stack: "torch.Tensor", call: Call, borders: Sequence[int]) -> StackRun:
        """Return what orthogonalizes a normalized stack portion by portion.

        Only of a backend that takes portions.

        Args:
            stack: ``(num_matrices, rows, cols)`` bfloat16; read until :meth:`StackRun.iterate`
                returns.
            call: What it is orthogonalized as.
            borders: First line of each portion, and the end.

        Raises:
            ValueError: The backend takes no portions.
        """
        raise ValueError(
            f"{self.name}: expected a backend that takes portions, got one that needs all rows at "
            "once. Call run()."
        )
