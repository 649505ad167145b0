# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""emerging-optimizers' own steps: with this backend results are upstream's bits.

Memory layout changes the last bits of bf16 products: stacks are contiguous, and transposed by a
view as emerging-optimizers does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import Backend, Work
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.stack_run import PortionedRun, StackRun

if TYPE_CHECKING:
    import torch


class Standard(Backend):
    """Three products a step: X X^T, its square, and their sum with X."""

    name = "standard"
    takes_portions = True

    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> Work:
        """Count 4 m n^2 + 2 n^3 operations a step. Splitting divides m alone."""
        steps = sum(segments)
        return Work(steps * (4 * m / num_parts * n * n + 2 * n**3), 3 * steps, steps)

    def run(self, stack: "torch.Tensor", call: Call) -> "torch.Tensor":
        """Orthogonalize a stack; see :meth:`Backend.run`."""
        return (_normalized if call.is_normalized else _one_by_one)(stack, call)

    def start(self, stack: "torch.Tensor", call: Call, borders: Sequence[int]) -> StackRun:
        """Take the first and the last product by portion; see :meth:`Backend.start`."""
        return _StandardRun(stack, call, borders)


class _StandardRun(PortionedRun):
    """The steps of "medium" precision."""

    def _take(self, portion: int) -> "torch.Tensor":
        return self._portion(self._lines(self._stack), portion)

    def _steps(self) -> None:
        import torch

        x = self._lines(self._stack)
        gram = self._first_gram(x.dtype)
        for number, (a, b, c) in enumerate(self._call.coefficients, start=1):
            if self._call.parts_group is not None:
                torch.distributed.all_reduce(gram, group=self._call.parts_group)
            factor = torch.baddbmm(gram, gram, gram, alpha=c, beta=b)
            if number < len(self._call.coefficients):
                x = torch.baddbmm(x, factor, x, beta=a)
                gram = x @ x.mT
        if len(self._call.coefficients) == 1:
            x = x.clone()  # others arrive in the memory of the stack
        self._x, self._factor, self._a = x, factor, a

    def _last_product(self, x: "torch.Tensor") -> "torch.Tensor":
        import torch

        return torch.baddbmm(x, self._factor, x, beta=self._a)


def _one_by_one(stack: "torch.Tensor", call: Call) -> "torch.Tensor":
    """Call emerging-optimizers' function for each fp32 matrix."""
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    results = [
        muon_utils.newton_schulz(
            matrix,
            call.settings.steps,
            call.settings.coefficient_type,
            transpose=call.is_tall,
            tp_group=call.parts_group,
        )
        for matrix in stack
    ]
    return results[0].unsqueeze(0) if len(results) == 1 else torch.stack(results)


def _normalized(stack: "torch.Tensor", call: Call) -> "torch.Tensor":
    """Take the steps of "medium" precision on normalized bf16 matrices, in one call.

    The norm was taken in float64 before the matrix was assembled. emerging-optimizers' function
    would take it again, of the rounded bf16 values.
    """
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    # Tall matrices are transposed by a view: the Gram matrix is then that of the shorter side.
    # torch.baddbmm and torch.addmm may choose different kernels. One matrix alone takes the step
    # that upstream takes, so that its bits are upstream's.
    x = stack if stack.shape[0] > 1 else stack[0]
    step = muon_utils.newton_schulz_step if x.ndim == 2 else muon_utils.batched_newton_schulz_step
    x = x.mT if call.is_tall else x
    for a, b, c in call.coefficients:
        x = step(x, a, b, c, tp_group=call.parts_group)
    x = x.mT if call.is_tall else x
    return x if x.ndim == 3 else x.unsqueeze(0)
