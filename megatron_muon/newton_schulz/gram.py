# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on the Gram matrix.

Every step multiplies X by a polynomial of its Gram matrix R = X X^T, and all of these polynomials
commute. So the steps need X only at the end: Q gathers their product, and R follows X::

    P = a I + b R + c R^2        Q <- P Q        R <- P R P

X is multiplied by Q at the end of a segment, see :mod:`megatron_muon.newton_schulz.restarts`. R is
n x n, n the shorter side: the longer m is, the more is saved.

Precision decides whether this works: fp16 with fp32 sums does on a GPU. bf16 has errors three times
those of standard steps on many matrices. Entries of a normalized X are as small as 1e-4 and those
of R as 1e-6, where fp16 has few bits left. So X is held times 64, and b and c are divided by 64^2
and 64^4, all powers of two: exact. P has entries as small, but they stand beside a I.

Source of the form: Dao-AILab's gram-newton-schulz.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import Backend, Work
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.coefficients import Coefficients
from megatron_muon.newton_schulz.normalize import normalize
from megatron_muon.newton_schulz.restarts import segments_of
from megatron_muon.newton_schulz.stack_run import PortionedRun, StackRun

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Singular values stay below 2, so R, which grows by the square, below 2**14: fp16 ends at 2**16.
_SCALE = 64.0


class Gram(Backend):
    """Products of n x n matrices, and two with X a segment."""

    name = "gram"
    takes_portions = True

    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> Work:
        """Count 4 m n^2 operations a segment, and 2 n^3 for each product of n x n matrices.

        Splitting divides m alone.
        """
        num_square = num_square_products(segments)
        flops = 4 * m / num_parts * n * n * len(segments) + 2 * n**3 * num_square
        return Work(flops, 2 * len(segments) + num_square, len(segments))

    def run(self, stack: "torch.Tensor", call: Call) -> "torch.Tensor":
        """Orthogonalize a stack in one call; see :meth:`Backend.run`.

        Memory: beside the result two copies of the stack in the dtype below, and five n x n
            matrices for each of its matrices.
        """
        x = stack if call.is_normalized else normalize(stack, call.parts_group)
        x = x.mT if call.is_tall else x
        # Scaled before it is rounded to fp16: small elements would lose their bits.
        x = x.mul(_SCALE).to(_dtype(stack, call))
        with _fp32_sums(x):
            for coefficients in _segments(call):
                # Without names: they would keep n x n matrices while the next ones are made.
                x = (
                    self.polynomial(
                        self._symmetric_product(x, x.mT), coefficients, call.parts_group
                    )
                    @ x
                )
        x = x.mT if call.is_tall else x
        result = x.bfloat16() if call.settings.is_bf16 else x
        return result.mul_(1 / _SCALE).to(stack.dtype)

    def start(self, stack: "torch.Tensor", call: Call, borders: Sequence[int]) -> StackRun:
        """Take the first and the last product by portion; see :meth:`Backend.start`."""
        return _GramRun(self, stack, call, borders)

    def _symmetric_product(
        self,
        a: "torch.Tensor",
        b: "torch.Tensor",
        c: "torch.Tensor | None" = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> "torch.Tensor":
        """Return ``alpha a b + beta c``, which is symmetric, ``(num_matrices, n, n)``."""
        import torch

        return a @ b if c is None else torch.baddbmm(c, a, b, alpha=alpha, beta=beta)

    def polynomial(
        self,
        r: "torch.Tensor",
        coefficients: Sequence[Coefficients],
        parts_group: "dist.ProcessGroup | None",
    ) -> "torch.Tensor":
        """Take the steps of a segment on a Gram matrix, ``(num_matrices, n, n)``, scaled.

        Args:
            r: The Gram matrix, or what the lines of this owner add to it.
            coefficients: Of the steps.
            parts_group: Owners of the matrix; None for one.

        Returns:
            What X is to be multiplied with, of the same shape.
        """
        import torch
        import torch.distributed as dist

        product = self._symmetric_product
        if parts_group is not None:
            dist.all_reduce(r, group=parts_group)
        q: torch.Tensor | None = None
        for number, (a, b, c) in enumerate(coefficients, start=1):
            # P without its a I, which is added where P is multiplied.
            p = product(r, r, r, alpha=c / _SCALE**4, beta=b / _SCALE**2)
            if q is None:
                q = p.clone()
                q.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                q = product(q, p, q, beta=a)
            if number < len(coefficients):
                half = product(r, p, r, beta=a)
                r = product(half, p, half, beta=a)
                # A name keeps its n x n matrix in memory.
                del half
            del p
        assert q is not None  # a segment has a step
        return q


class _GramRun(PortionedRun):
    """The Gram form of a stack on its way; arguments as for :class:`PortionedRun`."""

    def __init__(
        self, backend: Gram, stack: "torch.Tensor", call: Call, borders: Sequence[int]
    ) -> None:
        import torch

        super().__init__(stack, call, borders)
        self._backend = backend
        self._x = self._lines(torch.empty_like(stack, dtype=_dtype(stack, call)))

    def add(self, portion: int) -> None:
        """Add to the first Gram matrix; see :meth:`StackRun.add`."""
        with _fp32_sums(self._x):
            super().add(portion)

    def _take(self, portion: int) -> "torch.Tensor":
        arrived = self._portion(self._lines(self._stack), portion)
        return self._portion(self._x, portion).copy_(arrived * _SCALE)

    def _steps(self) -> None:
        call = self._call
        gram = self._first_gram(self._x.dtype)
        *others, last = _segments(call)
        with _fp32_sums(self._x):
            for coefficients in others:
                x = self._backend.polynomial(gram, coefficients, call.parts_group) @ self._x
                self._x, gram = x, x @ x.mT
            self._factor = self._backend.polynomial(gram, last, call.parts_group)

    def _last_product(self, x: "torch.Tensor") -> "torch.Tensor":
        with _fp32_sums(x):
            return (self._factor @ x).to(self._stack.dtype).mul_(1 / _SCALE)


def _dtype(stack: "torch.Tensor", call: Call) -> "torch.dtype":
    """Return what matrices are multiplied in."""
    import torch

    # CPUs multiply fp16 slowly, or in fp16 sums. In fp32 mode matrices stay in fp32.
    is_half = call.settings.is_bf16 and stack.device.type == "cuda"
    return torch.float16 if is_half else torch.float32


def _segments(call: Call) -> Iterator[Sequence[Coefficients]]:
    """Yield the coefficients of each segment."""
    coefficients, first = call.coefficients, 0
    for steps in segments_of(coefficients):
        yield coefficients[first : first + steps]
        first += steps


def num_square_products(segments: Sequence[int]) -> int:
    """Count the products of n x n matrices.

    A step has R^2, Q P and two for P R P. The first of a segment has no Q yet, the last one needs
    no new R.
    """
    return sum(4 * steps - 3 for steps in segments)


@contextmanager
def _fp32_sums(x: "torch.Tensor") -> Iterator[None]:
    """Keep torch from adding up in fewer bits than fp32 has.

    On a GPU cuBLAS may add up fp16 products, or their partial sums, in fp16. On a CPU "medium"
    precision, which is set around a step, may multiply fp32 matrices in bf16.
    """
    import torch
    from emerging_optimizers.utils import fp32_matmul_precision

    if x.device.type == "cpu":
        with fp32_matmul_precision("highest"):
            yield
        return
    flags = torch.backends.cuda.matmul
    sums = flags.allow_fp16_accumulation
    partial_sums = (
        flags.allow_fp16_reduced_precision_reduction,
        flags.allow_fp16_reduced_precision_reduction_split_k,
    )
    flags.allow_fp16_accumulation = False
    flags.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_fp16_accumulation = sums
        flags.allow_fp16_reduced_precision_reduction = partial_sums
