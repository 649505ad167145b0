# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Fused element-wise forms against the separate ones, by their bits."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from gpu_checks.report import Context, Report

_SHAPES = {
    "cuda": [(4096, 4096), (1536, 2048), (33, 127), (1, 5), (2048, 768)],
    "cpu": [(64, 96), (33, 127), (1, 5)],
}
_MOMENTUM, _LR, _WEIGHT_DECAY = 0.95, 0.01, 0.1
# Scale factors: of a tall matrix, the usual extra one, none.
_FACTORS = (3.872983455657959, 0.2, 1.0)

type Tensors = list[torch.Tensor]


class Pair(NamedTuple):
    """Two ways to the same tensors.

    Args:
        name: What is compared.
        separate: One call for each step and tensor.
        fused: Fewer calls.
    """

    name: str
    separate: Callable[[], Tensors]
    fused: Callable[[], Tensors]


def check(context: Context, report: Report) -> None:
    """Compare all pairs, on small, large and special values."""
    device = torch.device(context.device)
    matrices = [_values(shape, seed, device) for seed, shape in enumerate(_SHAPES[context.device])]
    others = [
        _values(shape, 100 + seed, device) for seed, shape in enumerate(_SHAPES[context.device])
    ]
    names = []
    for pair in (*_momentum(matrices, others), *_wire(matrices), *_results(matrices)):
        for expected, found in zip(pair.separate(), pair.fused(), strict=True):
            report.expect(
                _bits_equal(found, expected), f"{pair.name}: {tuple(found.shape)} has other bits"
            )
        names.append(pair.name)
    report.data("pairs", names)
    report.figure(f"{len(names)} pairs on {len(matrices)} shapes: {', '.join(names)}")


def _values(shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    # Zeros, what rounds to zero, what rounds up to the next power of two, subnormal, large.
    special = torch.tensor([0.0, -0.0, 1e-42, 1.9999999, 3e38, -1e-30])
    flat = drawn.view(-1)
    count = min(len(special), flat.numel())
    flat[:count] = special[:count]
    return drawn.to(device)


def _bits_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    # As integers: -0.0 equals 0.0, and NaN not itself.
    kind = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(kind), expected.contiguous().view(kind)
    )


def _momentum(matrices: Tensors, others: Tensors) -> Iterator[Pair]:
    """Yield weight decay, momentum and Nesterov, of a group at once."""

    def in_place(change: Callable[[Tensors], object]) -> Callable[[], Tensors]:
        """Return a call that changes copies of the matrices."""

        def call() -> Tensors:
            """Copy, change, return."""
            copies = [matrix.clone() for matrix in matrices]
            change(copies)
            return copies

        return call

    decay = -_LR * _WEIGHT_DECAY
    yield Pair(
        "weight decay",
        in_place(lambda copies: [x.add_(x, alpha=decay) for x in copies]),
        in_place(lambda copies: torch._foreach_add_(copies, copies, alpha=decay)),
    )
    yield Pair(
        "update",
        in_place(lambda copies: [x.add_(y, alpha=-_LR) for x, y in zip(copies, others)]),  # noqa: B905
        in_place(lambda copies: torch._foreach_add_(copies, others, alpha=-_LR)),
    )
    yield Pair(
        "momentum",
        in_place(lambda copies: [x.lerp_(y, 1 - _MOMENTUM) for x, y in zip(copies, others)]),  # noqa: B905
        in_place(lambda copies: torch._foreach_lerp_(copies, others, 1 - _MOMENTUM)),
    )
    yield Pair(
        "Nesterov",
        lambda: [
            torch.lerp(x, y, _MOMENTUM, out=torch.empty_like(x))
            for x, y in zip(matrices, others, strict=True)
        ],
        lambda: list(torch._foreach_lerp(matrices, others, _MOMENTUM)),
    )


def _wire(matrices: Tensors) -> Iterator[Pair]:
    """Yield what is done to rows on their way to the owner."""
    norms = [matrix.double().square().sum().sqrt().float() for matrix in matrices]

    def divided_then_rounded() -> Tensors:
        """Divide into fp32 memory, then copy to bf16."""
        return [(x / norm).bfloat16() for x, norm in zip(matrices, norms, strict=True)]

    def divided_into_bf16() -> Tensors:
        """Divide straight into bf16 memory."""
        return [
            torch.div(x, norm, out=torch.empty_like(x, dtype=torch.bfloat16))
            for x, norm in zip(matrices, norms, strict=True)
        ]

    yield Pair("division into bf16", divided_then_rounded, divided_into_bf16)

    def copied_together() -> Tensors:
        """Copy all in one call."""
        targets = [torch.empty_like(x, dtype=torch.bfloat16) for x in matrices]
        torch._foreach_copy_(targets, matrices)
        return targets

    yield Pair("copy to bf16", lambda: [x.bfloat16() for x in matrices], copied_together)


def _results(matrices: Tensors) -> Iterator[Pair]:
    """Yield what is done to results on their way to the parameters."""
    results = [matrix.bfloat16() for matrix in matrices]

    def copied_then_multiplied() -> Tensors:
        """Copy to fp32, then multiply by one factor after the other."""
        found = []
        for result in results:
            rows = result.float()
            for factor in _FACTORS:
                rows.mul_(factor)
            found.append(rows)
        return found

    def multiplied_into_fp32() -> Tensors:
        """Multiply the first factor into fp32 memory, and leave out the factor 1."""
        found = []
        for result in results:
            first = torch.full((1, 1), _FACTORS[0], device=result.device)
            rows = torch.mul(result, first, out=torch.empty_like(result, dtype=torch.float32))
            for factor in _FACTORS[1:]:
                if factor != 1.0:
                    rows.mul_(factor)
            found.append(rows)
        return found

    yield Pair("multiplication into fp32", copied_then_multiplied, multiplied_into_fp32)

    def multiplied_together() -> Tensors:
        """Multiply all by one factor in one call."""
        rows = [result.float() for result in results]
        for factor in _FACTORS:
            torch._foreach_mul_(rows, [factor] * len(rows))
        return rows

    yield Pair("multiplication of a list", copied_then_multiplied, multiplied_together)

    def transposed_together() -> Tensors:
        """Copy transposed views in one call."""
        targets = [torch.empty_like(x.mT, dtype=torch.float32).contiguous() for x in results]
        torch._foreach_copy_(targets, [x.mT for x in results])
        return targets

    yield Pair(
        "transposed copy", lambda: [x.mT.contiguous().float() for x in results], transposed_together
    )
