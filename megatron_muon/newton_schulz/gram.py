# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on the Gram matrix.

Every step multiplies X by a polynomial of its Gram matrix R = X X^T, and all of these polynomials
commute. So the steps need X only at the end: Q accumulates their product, and R follows X::

    P = a I + b R + c R^2        Q <- P Q        R <- P R P

R is n x n, n the shorter side: the longer m is, the more is saved.

Rounding moves the eigenvalues of R, so a small one may become negative, and every step then moves
it further: too many steps diverge. A restart multiplies X by Q, and begins again with a Gram matrix
without negative eigenvalues. The steps between restarts are a segment; ``segments_of()`` has a
table of them.

It needs the precision of fp16 with fp32 sums on a GPU: on many matrices, errors in bf16 are three
times as large as with standard steps. Entries of a normalized X are as small as 1e-4, and entries
of R as 1e-6, where fp16 has few bits left. So X is multiplied by 64, and b and c are divided by
64^2 and 64^4, which is exact. Small entries of P do not matter beside a I.

Source of the form and of restarts: Dao-AILab's gram-newton-schulz.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import Backend, FlopCount, NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import Coefficients
from megatron_muon.newton_schulz.standard import normalize

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Steps between restarts, a digit a segment, for 1, 2, 3, ... steps. In fp16 rounding moves an
# eigenvalue r by a unit in the last place of the largest one. With q the polynomial of a segment,
# the largest |q(r + unit) - q(r)| sqrt(r) is its error. These are the fewest segments whose errors
# are below 0.2, and among them the segments with the smallest error: five steps of quintic have
# 0.12, and 0.30 with the restart after step 3. CPU ranks, in fp32, restart as GPUs do.
_SEGMENTS = {
    "simple": "1 2 3 22 32 33 322 323 333 3223",
    "quintic": "1 2 21 22 23 222 232 2222 2322 2323",
    "polar_express": "1 2 12 22 122 222 223 224 225 2224",
    "cans": "1 2 12 22 122 123 223 224 1224 1234",
    "aol": "1 2 3 22 23 33 232 233 333 2332",
    "deepseekv4": "1 2 3 22 32 33 322 323 333 3223",
    "cubic5": "1 2 3 22 23",
}
# Singular values stay below 2, so R, which grows by the square, below 2**14: fp16 ends at 2**16.
_SCALE = 64.0


class Gram(Backend):
    """Products of n x n matrices, and two with X per segment."""

    name = "gram"
    workspace = (3, 5)

    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> FlopCount:
        """Count the work of one owner; see ``Backend.work()``. Splitting only divides m."""
        # A step has the products R^2, Q P and two for P R P. The first one of a segment has no Q
        # yet, and the last one needs no new R.
        num_square = sum(4 * steps - 3 for steps in segments)
        flops = 4 * m / num_parts * n * n * len(segments) + 2 * n**3 * num_square
        return FlopCount(flops, 2 * len(segments) + num_square, len(segments))

    def item_bytes(self, stack: "torch.Tensor") -> int:
        """Return 2 on a GPU, for fp16, and 4 elsewhere, for fp32."""
        return 2 if stack.dtype.itemsize == 2 and stack.device.type == "cuda" else 4

    def run(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
        """Orthogonalize a stack as one batch; see ``Backend.run()``.

        Memory: in addition to the result two copies of the stack in the dtype of ``_dtype()``, and
            five n x n matrices per matrix.
        """
        # Scaled before rounding to fp16, where small elements would lose bits.
        x = normalize(stack, args).mul(_SCALE).to(_dtype(stack, args))
        settings, first = args.settings, 0
        with _fp32_sums(x):
            for steps in segments_of(settings.coefficient_type, settings.steps):
                coefficients = settings.coefficients[first : first + steps]
                first += steps
                wide = x.mT if args.is_tall else x
                q = _polynomial(wide @ wide.mT, coefficients, args.parts_group)
                # Q is symmetric. A tall matrix stays tall: transposing it would be a copy.
                x = x @ q if args.is_tall else q @ x
                # Names would keep their memory while the next ones are computed.
                del q, wide
        result = x.bfloat16() if settings.is_bf16 else x
        return result.mul_(1 / _SCALE).to(stack.dtype)


def _polynomial(
    r: "torch.Tensor",
    coefficients: Sequence[Coefficients],
    parts_group: "dist.ProcessGroup | None",
) -> "torch.Tensor":
    """Return the product of the polynomials of a segment, ``(num_matrices, n, n)``.

    It overwrites ``r``, the scaled Gram matrices, or this owner's part of their sum.
    """
    import torch
    import torch.distributed as dist

    product = torch.baddbmm
    if parts_group is not None:
        dist.all_reduce(r, group=parts_group)
    q: torch.Tensor | None = None
    for number, (a, b, c) in enumerate(coefficients, start=1):
        # P without its term a I, which is added in the products with P.
        p = product(r, r, r, alpha=c / _SCALE**4, beta=b / _SCALE**2)
        if q is None:
            q = p.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = product(q, q, p, beta=a)
        if number < len(coefficients):
            half = product(r, r, p, beta=a)
            r = product(half, half, p, beta=a)
            # A name would keep its n x n matrix in memory.
            del half
        del p
    assert q is not None  # a segment has a step
    return q


def _dtype(stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.dtype":
    """Return the dtype of the products."""
    import torch

    # CPUs multiply fp16 slowly, or with fp16 sums. In fp32 mode matrices stay in fp32.
    is_half = args.settings.is_bf16 and stack.device.type == "cuda"
    return torch.float16 if is_half else torch.float32


def segments_of(coefficient_type: str, steps: int) -> tuple[int, ...]:
    """Return the number of steps of every segment.

    Without a table, for other coefficients or more steps, it restarts every two steps, which is
    safe for all sets of the table: the errors are below 0.1.
    """
    by_num_steps = _SEGMENTS.get(coefficient_type, "").split()
    if steps <= len(by_num_steps):
        return tuple(map(int, by_num_steps[steps - 1]))
    return (2,) * (steps // 2) + (1,) * (steps % 2)


@contextmanager
def _fp32_sums(x: "torch.Tensor") -> Iterator[None]:
    """Make torch accumulate in fp32.

    On a GPU cuBLAS may accumulate fp16 products, or their partial sums, in fp16. On a CPU "medium"
    precision, which is set during a step, may multiply fp32 matrices in bf16.
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
