# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of Newton-Schulz, and of one call; the coefficients are emerging-optimizers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.methods import Namo, StackMethod

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Coefficients = tuple[float, float, float]

# Steps between restarts of the Gram form. A segment of steps multiplies X by a polynomial of its
# Gram matrix R. Rounding moves eigenvalues of R, so that a small one may become negative, and every
# further step moves it further; a restart begins again with a Gram matrix of X. These are the
# fewest segments that change a singular value of about 1 by at most 0.2 if fp16 rounds R. Source of
# restarts: Dao-AILab's gram-newton-schulz, which found the same one for quintic by trial.
_SEGMENTS: dict[tuple[str, int], tuple[int, ...]] = {
    ("quintic", 5): (2, 3),
    ("simple", 5): (3, 2),
    ("aol", 4): (2, 2),
    ("polar_express", 5): (1, 2, 2),
    ("polar_express", 8): (2, 2, 4),
    ("cans", 5): (1, 2, 2),
    ("deepseekv4", 10): (3, 2, 2, 3),
}


@dataclass(frozen=True)
class NewtonSchulzSettings:
    """How matrices are orthogonalized and scaled.

    Args:
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        is_bf16: Whether it runs in bf16 (matmul precision "medium"); its results are then
            bf16-valued, and are sent as bf16 in either wire dtype.
        scale: Returns the factors of a result by ``(rows, cols)`` of the whole block; it is
            multiplied with them in fp32, one after the other.
        function: Orthogonalizes stacks of float32 matrices ``(num_matrices, rows, cols)`` in place
            of Newton-Schulz; None for Newton-Schulz.
        method: Changes the results before they are scaled; None for nothing.
    """

    steps: int
    coefficient_type: str
    is_bf16: bool
    scale: Callable[[int, int], Sequence[float]]
    function: "Callable[[torch.Tensor], torch.Tensor] | None" = None
    method: StackMethod | Namo | None = None

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """Coefficients by step; see :func:`coefficients_of`."""
        return coefficients_of(self.steps, self.coefficient_type)


@lru_cache
def coefficients_of(steps: int, coefficient_type: str) -> tuple[Coefficients, ...]:
    """Return ``(a, b, c)`` by step: X becomes a X + b X X^T X + c (X X^T)^2 X.

    If there are more steps than coefficients, some sets repeat their last ones, and others start
    again with the first. Only the code of emerging-optimizers' function says which, so it is called
    with a function that records them in place of a step.

    Raises:
        ValueError: emerging-optimizers does not have the set, does not take this number of steps,
            or does not call its step once for each.
    """
    # Imports torch.
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    if coefficient_type not in muon_utils._COEFFICIENT_SETS:
        raise ValueError(
            f"coefficient_type: expected one of {sorted(muon_utils._COEFFICIENT_SETS)}, got "
            f"{coefficient_type!r}. Choose one"
        )
    recorded: list[Coefficients] = []

    def record(x: torch.Tensor, *coefficients: float, **_: object) -> torch.Tensor:
        recorded.append(coefficients)  # type: ignore[arg-type]
        return x

    step, muon_utils.newton_schulz_step = muon_utils.newton_schulz_step, record
    try:
        muon_utils.newton_schulz(torch.ones(1, 1, device="cpu"), steps, coefficient_type)
    except ValueError as error:
        raise ValueError(
            f"num_ns_steps: expected a number for {coefficient_type} coefficients, got {steps}. "
            f"{str(error).removesuffix('.')}"
        ) from error
    finally:
        muon_utils.newton_schulz_step = step
    if len(recorded) != steps:
        raise ValueError(
            f"coefficient_type: expected emerging-optimizers to take {steps} steps of "
            f"{coefficient_type} one by one, got {len(recorded)}. Choose another"
        )
    return tuple(recorded)


def segments_of(steps: int, coefficient_type: str) -> tuple[int, ...]:
    """Return the number of steps of every segment of the Gram form.

    Other numbers of steps, and other coefficients, restart every two steps.
    """
    by_two = (2,) * (steps // 2) + (1,) * (steps % 2)
    return _SEGMENTS.get((coefficient_type, steps), by_two)


@dataclass(frozen=True)
class Call:
    """How to orthogonalize a stack of matrices.

    Args:
        settings: Steps, coefficients and precision.
        whole_shape: Shape of the whole matrices; larger than the stack's only for parts.
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
