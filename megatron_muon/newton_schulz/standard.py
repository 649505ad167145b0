# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps of emerging-optimizers: results have the same bits.

Memory layout may change the last bits of bf16 products, so stacks are contiguous, and tall matrices
are transposed by a view as in emerging-optimizers. On a GPU that view costs two copies with a
stride: 10 to 23 % of the time of a tall matrix on an H200 (docs/gpus.md). Steps on the tall matrix
itself have none, and are used for whole matrices where they have the same bits.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from megatron_muon.newton_schulz.backend import Backend, FlopCount, NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import coefficients_of

if TYPE_CHECKING:
    import torch


class Standard(Backend):
    """Three products per step: X X^T, its square, and their sum times X.

    Attributes:
        flops_of_step: Operations of a step, in units of ``m n^2`` and of ``n^3``.
    """

    name = "standard"
    flops_of_step: ClassVar[tuple[int, int]] = (4, 2)

    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> FlopCount:
        """Count the work of one owner; see ``Backend.work()``. Splitting only divides m."""
        steps, (long, square) = sum(segments), self.flops_of_step
        return FlopCount(steps * (long * m / num_parts * n * n + square * n**3), 3 * steps, steps)

    def run(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
        """Orthogonalize a stack; see ``Backend.run()``."""
        return (_normalized if args.is_normalized else _one_by_one)(stack, args)

    def check(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> None:
        """Choose the steps of tall matrices; see ``Backend.check()``."""
        if args.is_normalized:
            _stays_tall(stack if stack.shape[0] > 1 else stack[0], args)
        super().check(stack, args)


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
    if _stays_tall(x, args):
        for a, b, c in args.settings.coefficients:
            x = _tall_step(x, a, b, c)
        return x.view(stack.shape)
    step = muon_utils.newton_schulz_step if x.ndim == 2 else muon_utils.batched_newton_schulz_step
    x = x.mT if args.is_tall else x
    for a, b, c in args.settings.coefficients:
        x = step(x, a, b, c, tp_group=args.parts_group)
    x = x.mT if args.is_tall else x
    return x if x.ndim == 3 else x.unsqueeze(0)


def _stays_tall(x: "torch.Tensor", args: NewtonSchulzArgs) -> bool:
    # On CPUs the bits are usually others, and copies cost nothing beside products. An all-reduce
    # may add both halves of the Gram matrix of a split one in other orders.
    is_whole_on_gpu = args.parts_group is None and x.is_cuda
    return args.is_tall and is_whole_on_gpu and _tall_steps_keep_bits(x.shape, x.device)


def _tall_step(x: "torch.Tensor", a: float, b: float, c: float) -> "torch.Tensor":
    """Return ``a X + X (b G + c G^2)`` with ``G = X^T X``, which is symmetric.

    Args:
        x: Whole matrices, ``(rows, cols)`` or ``(num_matrices, rows, cols)``.
        a: First coefficient.
        b: Second coefficient.
        c: Third coefficient.
    """
    import torch

    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    gram = x.mT @ x
    return add_product(x, x, add_product(gram, gram, gram, alpha=c, beta=b), beta=a)


@functools.cache
def _tall_steps_keep_bits(shape: "torch.Size", device: "torch.device") -> bool:
    """Compare two steps on random tall matrices with emerging-optimizers' on transposed ones.

    Kernels decide, by shape: on an H200 they are the same for all sides of models that were tried,
    and others for 1500 x 1000.

    Memory: that of ``Standard.run()`` twice, once a shape, at construction.
    """
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    # Its own generator: Megatron's must be in the same state on tensor-parallel ranks.
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
    x = drawn.normal_(std=(shape[-2] * shape[-1]) ** -0.5, generator=generator)
    y = x.mT
    step = muon_utils.newton_schulz_step if x.ndim == 2 else muon_utils.batched_newton_schulz_step
    for a, b, c in coefficients_of(2, "quintic"):
        x, y = _tall_step(x, a, b, c), step(y, a, b, c)
    return torch.equal(x, y.mT)


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
