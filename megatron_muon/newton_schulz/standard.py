# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps of emerging-optimizers: results have the same bits.

Memory layout may change the last bits of bf16 products, so stacks are contiguous, and tall matrices
are transposed by a view as in emerging-optimizers. On a GPU that view costs two copies with a
stride: 10 to 23 % of the time of a tall matrix on an H200 (docs/gpus.md), which is 0.3 % of an
iteration at most (an estimate). Rejected: steps on the tall matrix itself, whose bits depend on its
shape.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import Backend, FlopCount, NewtonSchulzArgs

if TYPE_CHECKING:
    import torch


class Standard(Backend):
    """Three products per step: X X^T, its square, and their sum times X."""

    name = "standard"

    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> FlopCount:
        """Count the work of one owner; see ``Backend.work()``. Splitting only divides m."""
        steps = sum(segments)
        return FlopCount(steps * (4 * m / num_parts * n * n + 2 * n**3), 3 * steps, steps)

    def run(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
        """Orthogonalize a stack; see ``Backend.run()``."""
        return (_normalized if args.is_normalized else _one_by_one)(stack, args)


def _one_by_one(stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
    """Call emerging-optimizers' function on the fp32 matrices one by one."""
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    results = [
        muon_utils.newton_schulz(
            matrix,
            args.settings.steps,
            args.settings.coefficient_type,
            transpose=args.is_tall,
            tp_group=args.parts_group,
        )
        for matrix in stack
    ]
    return results[0].unsqueeze(0) if len(results) == 1 else torch.stack(results)


def _normalized(stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
    """Run the steps of "medium" precision on normalized bf16 matrices, as one batch.

    The norm was computed in float64 before the matrix was assembled. emerging-optimizers' function
    would compute it again from the rounded bf16 values.
    """
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    # torch.baddbmm and torch.addmm may choose different kernels: a single matrix uses upstream's
    # step, for the same bits.
    x = stack if stack.shape[0] > 1 else stack[0]
    step = muon_utils.newton_schulz_step if x.ndim == 2 else muon_utils.batched_newton_schulz_step
    x = x.mT if args.is_tall else x
    for a, b, c in args.settings.coefficients:
        x = step(x, a, b, c, tp_group=args.parts_group)
    x = x.mT if args.is_tall else x
    return x if x.ndim == 3 else x.unsqueeze(0)


@functools.cache
def least_norm() -> float:
    """Return emerging-optimizers' lower bound of norms: 1e-7 in 0.3.0, 1e-15 in 0.4.0."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    return float(inspect.signature(muon_utils.newton_schulz).parameters["eps"].default)


def normalize(stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
    """Divide matrices by their Frobenius norms, as emerging-optimizers does, unless that is done.

    Args:
        stack: ``(num_matrices, rows, cols)``, float32.
        args: Arguments of the stack.

    Communication: one all-reduce of a number per matrix if matrices are split.
    """
    import torch
    import torch.distributed as dist

    if args.is_normalized:
        return stack
    squares = stack.square().sum((-2, -1), keepdim=True)
    if args.parts_group is not None:
        dist.all_reduce(squares, group=args.parts_group)
    return stack / torch.sqrt_(squares).clamp_min_(least_norm())
