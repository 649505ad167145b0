# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class Work:
    """Cost of Newton-Schulz of one part of a matrix.

    Args:
        flops: Floating-point operations.
        num_products: Matrix products; at least one kernel per product.
        num_all_reduces: All-reduces of an n x n matrix if several owners split the matrix.
    """

    flops: float
    num_products: int
    num_all_reduces: int


class Backend(ABC):
    """One way to compute Newton-Schulz.

    Attributes:
        name: Its name in flags.
        reference: For kernels that are not torch's, the backend whose results they must match, up
            to rounding. Both run once per shape at construction, which also compiles the kernels
            before the first step.
        is_batched: Whether all matrices of a stack share its launches.
        communicates: Whether its kernels communicate, so that owners of a split matrix must run it
            together.
        workspace: Memory that a call needs beside its stack, at most: tensors of the size of the
            stack, its result included, and tensors of n x n a matrix, n the shorter side.
    """

    name: ClassVar[str]
    reference: ClassVar[str | None] = None
    is_batched: ClassVar[bool] = True
    communicates: ClassVar[bool] = False
    workspace: ClassVar[tuple[int, int]] = (3, 3)

    @abstractmethod
    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> Work:
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
        """Return a sentence for each requirement that a job does not meet."""
        return []

    def connect(self, parts_group: "dist.ProcessGroup") -> None:  # noqa: B027
        """Prepare the owners of split matrices to run it together, once at construction.

        All ranks of the group call it, in the same order of groups.

        Raises:
            RuntimeError: The preparation failed.
        """

    def workspace_bytes(self, stack: "torch.Tensor") -> int:
        """Return the memory that :meth:`run` needs beside a stack, at most."""
        stacks, squares = self.workspace
        num_elements = stacks * stack.numel() + squares * stack.shape[0] * min(stack.shape[1:]) ** 2
        return num_elements * self.item_bytes(stack)

    def item_bytes(self, stack: "torch.Tensor") -> int:
        """Return the bytes of an element while a stack is orthogonalized."""
        return stack.dtype.itemsize

    @abstractmethod
    def run(self, stack: "torch.Tensor", call: Call) -> "torch.Tensor":
        """Orthogonalize a stack, ``(num_matrices, rows, cols)``.

        Returns:
            Same shape and dtype, in new memory; bf16-valued with ``settings.is_bf16``.

        Communication: with ``parts_group`` an all-reduce of the norm unless the stack is
            normalized, and those of ``n * n`` elements that :meth:`work` counts.
        """


def gpu_problems(device: "torch.device", capabilities: Sequence[tuple[int, ...]] = ()) -> list[str]:
    """Return a sentence unless a device is a GPU of a given compute capability.

    Args:
        device: Device of the matrices.
        capabilities: Major versions, or major and minor ones; any if empty.
    """
    import torch

    if device.type != "cuda":
        return [f"expected a GPU, got {device.type} ranks"]
    if not capabilities:
        return []
    found = torch.cuda.get_device_capability(device)
    if any(found[: len(known)] == known for known in capabilities):
        return []
    known = ", ".join(".".join(map(str, capability)) for capability in capabilities)
    return [f"expected a GPU of compute capability {known}, got {found[0]}.{found[1]}"]
