# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on stacks of matrices; the maths is emerging-optimizers'.

Vocabulary:

==============  ================================================================================
stack           matrices of one shape, ``(num_matrices, rows, cols)``, contiguous
part            a slice of a matrix's longer side; its ranks all-reduce Gram matrices
normalized      divided by the Frobenius norm of the whole matrix, so that no singular value is
                above 1
==============  ================================================================================

Memory layout changes the last bits of bf16 products: stacks are contiguous, and transposed by a
view as emerging-optimizers does.
"""

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils

# The least norm that newton_schulz divides by, emerging-optimizers 0.3.0.
EPSILON = 1e-7
# emerging-optimizers 0.3.0, muon_utils.newton_schulz: the other sets start again from their first.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")


def newton_schulz(
    stack: torch.Tensor,
    *,
    steps: int,
    coefficient_type: str,
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
    results = [
        muon_utils.newton_schulz(
            matrix,
            steps,
            coefficient_type,  # type: ignore[arg-type]
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
    coefficient_type: str,
    whole_shape: tuple[int, int],
    parts_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Orthogonalize normalized bf16 matrices in one call: the steps of "medium" precision.

    The same as :func:`newton_schulz` but for the norm, which is taken before the matrix is
    assembled; emerging-optimizers would normalize the rounded bf16 values again.

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
    # torch.baddbmm and torch.addmm may choose different kernels: one matrix takes the step that
    # upstream takes with one.
    x = stack if stack.shape[0] > 1 else stack[0]
    step = muon_utils.newton_schulz_step if x.ndim == 2 else muon_utils.batched_newton_schulz_step
    x = x.mT if rows > cols else x
    for a, b, c in _coefficients(steps, coefficient_type):
        x = step(x, a, b, c, tp_group=parts_group)
    x = x.mT if rows > cols else x
    return x if x.ndim == 3 else x.unsqueeze(0)


def _coefficients(steps: int, coefficient_type: str) -> list[tuple[float, float, float]]:
    sets = muon_utils._COEFFICIENT_SETS[coefficient_type]
    mode = "repeat_last" if coefficient_type in _REPEAT_LAST else "cycle"
    return list(muon_utils.get_coefficient_iterator(steps, sets, mode=mode))  # type: ignore
