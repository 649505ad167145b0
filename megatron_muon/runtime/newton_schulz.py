# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on stacks of matrices; the maths is emerging-optimizers'.

Memory layout changes the last bits of bf16 products: stacks are contiguous, and transposed by a
view as emerging-optimizers does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils

# The least norm that newton_schulz divides by. Source: emerging-optimizers 0.3.0, muon_utils.
EPSILON = 1e-7
# These sets repeat their last coefficients when steps outnumber them; the others start again from
# their first. Source: emerging-optimizers 0.3.0, muon_utils.newton_schulz.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")


@dataclass(frozen=True)
class NewtonSchulzSettings:
    """How matrices are orthogonalized and scaled.

    Args:
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        is_bf16: Whether it runs in bf16 (matmul precision "medium"); its results are then
            bf16-valued and travel as bf16 on either wire.
        scale: Returns the factors that a result is multiplied with in fp32, one after the other,
            by ``(rows, cols)`` of the whole block.
    """

    steps: int
    coefficient_type: muon_utils.NSCoeffT
    is_bf16: bool
    scale: Callable[[int, int], Sequence[float]]


def newton_schulz(
    stack: torch.Tensor,
    *,
    steps: int,
    coefficient_type: muon_utils.NSCoeffT,
    whole_shape: tuple[int, int],
    parts_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Orthogonalize fp32 matrices one by one by emerging-optimizers' own function.

    Args:
        stack: ``(num_matrices, rows, cols)``, float32, not normalized.
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        whole_shape: Shape of the whole matrices; larger than the stack's only for parts.
        parts_group: Ranks that hold the parts of each matrix; None where matrices are whole.

    Returns:
        Same shape, float32; bf16-valued under matmul precision "medium".

    Communication: with ``parts_group`` one all-reduce for the norm and one of ``n * n`` elements a
        step, n the shorter side.
    """
    rows, cols = whole_shape
    # Orientation is that of the whole matrix: a part of a tall matrix may itself be wide.
    results = [
        muon_utils.newton_schulz(
            matrix,
            steps,
            coefficient_type,
            transpose=rows > cols,
            tp_group=parts_group,
        )
        for matrix in stack
    ]
    return results[0].unsqueeze(0) if len(results) == 1 else torch.stack(results)


def newton_schulz_normalized(
    stack: torch.Tensor,
    *,
    steps: int,
    coefficient_type: muon_utils.NSCoeffT,
    whole_shape: tuple[int, int],
    parts_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Orthogonalize normalized bf16 matrices in one call: the steps of "medium" precision.

    The norm was taken in float64 before the matrix was assembled. :func:`newton_schulz` would take
    it again, of the rounded bf16 values.

    Args:
        stack: ``(num_matrices, rows, cols)``, bfloat16, normalized.
        steps: Newton-Schulz steps.
        coefficient_type: Name of emerging-optimizers' coefficients.
        whole_shape: Shape of the whole matrices; larger than the stack's only for parts.
        parts_group: Ranks that hold the parts of each matrix; then the stack holds one.

    Returns:
        Same shape, bfloat16.

    Communication: with ``parts_group`` one all-reduce of ``n * n`` bf16 elements a step, n the
        shorter side.
    """
    rows, cols = whole_shape
    # Tall matrices are transposed by a view: the Gram matrix is then that of the shorter side.
    # torch.baddbmm and torch.addmm may choose different kernels. One matrix alone takes the step
    # that upstream takes, so that its bits are upstream's.
    x = stack if stack.shape[0] > 1 else stack[0]
    step = muon_utils.newton_schulz_step if x.ndim == 2 else muon_utils.batched_newton_schulz_step
    x = x.mT if rows > cols else x
    for a, b, c in _coefficients(steps, coefficient_type):
        x = step(x, a, b, c, tp_group=parts_group)
    x = x.mT if rows > cols else x
    return x if x.ndim == 3 else x.unsqueeze(0)


def _coefficients(
    steps: int, coefficient_type: muon_utils.NSCoeffT
) -> list[tuple[float, float, float]]:
    sets = muon_utils._COEFFICIENT_SETS[coefficient_type]
    mode = "repeat_last" if coefficient_type in _REPEAT_LAST else "cycle"
    return list(muon_utils.get_coefficient_iterator(steps, sets, mode=mode))  # type: ignore
