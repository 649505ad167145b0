# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of Newton-Schulz: coefficients of emerging-optimizers, and functions of owners.

A method keeps float32 state per block, whose shape depends on the block's shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

Coefficients = tuple[float, float, float]

# Continuation of a set that has fewer coefficients than steps.
# Source: emerging-optimizers 0.3.0, newton_schulz().
_MODES = {
    "simple": "cycle",
    "quintic": "cycle",
    "aol": "cycle",
    "polar_express": "repeat_last",
    "cans": "repeat_last",
    "deepseekv4": "repeat_last",
}


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


class MatrixOwner(Protocol):
    """Acts on whole matrices on the rank that owns them, around Newton-Schulz or in place of it.

    Attributes:
        num_inputs: Tensors of a matrix that travel to it: 1 for rows of momentum, which results
            replace; 2 for float32 weights and gradients, in place of Newton-Schulz, where new
            weights replace weights.
    """

    num_inputs: int

    def claim(
        self, matrices: "Sequence[tuple[torch.Tensor, str]]", *stacks: "torch.Tensor"
    ) -> Callable[[Callable[[], None]], None]:
        """Register a stack of matrices that this rank owns, and return the function that acts.

        It is given a function that orthogonalizes the first stack in place.

        Args:
            matrices: By matrix, the parameter that it belongs to, and its name, which is the same
                on all ranks, whoever owns it.
            stacks: By input, ``(num_matrices, rows, cols)`` float32, memory of the exchange. The
                first is updated in place.
        """


class NorMuon:
    """Divide rows by the root of their mean square, or columns of wide blocks.

    Results keep the norm that they had before.

    Method: NorMuon (https://arxiv.org/abs/2510.05491). Source: emerging-optimizers 0.3.0,
    ``AdaptiveMuon._apply_moment2_normalization`` with ``normuon``.

    Args:
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.
    """

    def __init__(self, beta2: float = 0.95, eps: float = 1e-8) -> None:
        self.beta2, self.eps = beta2, eps

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


# Maps outputs and inputs of a matrix to two factors.
type Scale = Callable[[int, int], tuple[float, float]]


@dataclass(frozen=True)
class NewtonSchulzSettings:
    """Settings of orthogonalization and scale.

    Args:
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        is_bf16: Whether it runs in bf16 (matmul precision "medium"); its results are then
            bf16-valued, and are sent back as bf16 with any ``comm_dtype``.
        scale: Returns the two factors of a result by ``(rows, cols)`` of the whole block; it is
            multiplied with them in fp32, one after the other.
        function: Orthogonalizes stacks of float32 matrices ``(num_matrices, rows, cols)`` in place
            of Newton-Schulz; None for Newton-Schulz.
        owner: Acts on whole matrices, before results are scaled; None for nothing.
    """

    steps: int
    coefficient_type: str
    is_bf16: bool
    scale: Scale
    function: "Callable[[torch.Tensor], torch.Tensor] | None" = None
    owner: MatrixOwner | None = None

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """Coefficients by step; see ``coefficients_of()``."""
        return coefficients_of(self.steps, self.coefficient_type)


@lru_cache
def coefficients_of(steps: int, coefficient_type: str) -> tuple[Coefficients, ...]:
    """Return ``(a, b, c)`` by step: X becomes a X + b X X^T X + c (X X^T)^2 X.

    If there are more steps than coefficients, some sets repeat their last ones, and others start
    again with the first.

    Raises:
        ValueError: emerging-optimizers does not have the set; or the set is of a later release,
            such as cubic5, and has another number of steps.
    """
    # Imports torch.
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    sets = muon_utils._COEFFICIENT_SETS
    if coefficient_type not in sets:
        raise ValueError(
            f"coefficient_type: expected one of {sorted(sets)}, got {coefficient_type!r}. "
            "Choose one"
        )
    of_type = sets[coefficient_type]
    mode = _MODES.get(coefficient_type)
    if mode is None and steps != len(of_type):
        raise ValueError(
            f"num_ns_steps: expected {len(of_type)} for {coefficient_type} coefficients, got "
            f"{steps}. Take all of them"
        )
    return tuple(muon_utils.get_coefficient_iterator(steps, of_type, mode or "cycle"))
