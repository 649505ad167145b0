# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods that change the results of Newton-Schulz before they are scaled, with some state.

An owner has whole matrices: it calls a :class:`StackMethod` on each stack of results.

State is a few numbers per block, in float32; its shape depends on that of the block.
"""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class StackMethod(Protocol):
    """Changes stacks of results of one shape, on the rank that owns them."""

    def state_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the state of a block: ``(rows, 1)``, ``(1, cols)`` or ``(1, 1)``."""

    def __call__(self, results: "torch.Tensor", state: "torch.Tensor") -> "torch.Tensor":
        """Return the changed results, and update the state in place.

        Args:
            results: ``(num_matrices, rows, cols)``, float32. They may be overwritten.
            state: The state of each matrix, such as ``(num_matrices, rows, 1)``; zeros at first.

        Memory: up to three tensors like the results, the returned one included.
        """


class _Decaying:
    """A second moment that decays, as in emerging-optimizers' ``AdaptiveMuon``.

    Args:
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.
    """

    def __init__(self, beta2: float = 0.95, eps: float = 1e-8) -> None:
        self.beta2, self.eps = beta2, eps


class NorMuon(_Decaying):
    """Divide rows by the root of their mean square, or columns of blocks with more of these.

    Results keep the norm that they had before.

    Method: NorMuon (https://arxiv.org/abs/2510.05491). Source: emerging-optimizers 0.3.0,
    ``AdaptiveMuon._apply_moment2_normalization`` with ``normuon``.
    """

    def state_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the moments: of rows, or of columns if there are more of them."""
        return (rows, 1) if rows >= cols else (1, cols)

    def __call__(self, results: "torch.Tensor", state: "torch.Tensor") -> "torch.Tensor":
        """Advance the moments, and divide."""
        import torch

        rows, cols = results.shape[1:]
        if rows > cols:
            # The order of upstream's sums: its results of tall matrices are transposed views.
            results = results.mT.contiguous().mT
        means = results.square().mean(dim=2 if rows >= cols else 1, keepdim=True)
        state.lerp_(means, 1 - self.beta2)
        update = results * state.clamp_min(self.eps).rsqrt_()
        before = torch.linalg.vector_norm(results, dim=(1, 2), keepdim=True)
        after = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True)
        return update.mul_(before / after.clamp_min_(self.eps))


class Namo(_Decaying):
    """Multiply results by the norm of the update, over the mean norm of past gradients.

    Norms are all that it needs: every rank computes the factors of blocks.

    Method: NAMO (https://arxiv.org/abs/2602.17080). Source: emerging-optimizers 0.3.0,
    ``AdaptiveMuon._apply_moment2_normalization`` with ``namo``.
    """

    def state_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the state of a block: one number."""
        return 1, 1

    def factors(
        self, state: "torch.Tensor", gradient: "torch.Tensor", update: "torch.Tensor"
    ) -> "torch.Tensor":
        """Advance the state, and return the factors of blocks.

        Args:
            state: ``(num_blocks,)``.
            gradient: Norms of gradients, ``(num_blocks,)``.
            update: Norms of what is orthogonalized, ``(num_blocks,)``.
        """
        state.lerp_(gradient.square(), 1 - self.beta2)
        return update / (state.sqrt() + self.eps)
