# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums of squares on the device against float64 on the CPU, whole and cut."""

import random
from collections.abc import Iterator, Sequence

import torch

from gpu_checks.report import Context, Report
from megatron_muon.runtime.norms import SumOfSquares

_SHAPES = {
    "cuda": [(4096, 4096), (8192, 1024), (28672, 4096), (257, 129), (1, 7), (3, 100_003)],
    "cpu": [(512, 96), (257, 129), (1, 7), (3, 10_003)],
}
# A float64 sum of 1e8 squares in any order is off by a few 1e-15 of itself, by 1e-12 at worst.
_TOLERANCE = 1e-12
MAX_CUTS, REPEATS = 8, 20


def check(context: Context, report: Report) -> None:
    """Compare with the CPU, over cuts, in deterministic mode, and repeated."""
    torch.set_num_threads(1 if context.device == "cpu" else torch.get_num_threads())
    device = torch.device(context.device)
    sums = SumOfSquares(device)
    report.expect(list(sums([])) == [], "expected no sums of no tensors, got some")
    worst, num_views, num_cut = 0.0, 0, 0
    for index, shape in enumerate(_SHAPES[context.device]):
        generator = torch.Generator().manual_seed(index)
        on_cpu = torch.randn(shape, generator=generator) * 10.0 ** -(3 * (index % 3))
        matrix = on_cpu.to(device)
        for name, views in _views(matrix).items():
            expected = [view.cpu().double().square().sum().item() for view in views]
            for found, value in zip(sums(views), expected, strict=True):
                error = abs(found.item() - value) / max(value, 1e-300)
                worst, num_views = max(worst, error), num_views + 1
                report.expect(
                    error <= _TOLERANCE and found.dtype == torch.float64,
                    f"{shape}, {name}: a {found.dtype} sum is off by {error:.1e} of itself",
                )
        num_cut += _compare_cuts(sums, matrix, index, report)
    report.figure(f"{num_views} views, off by {worst:.1e} of a sum at most")
    report.figure(f"{num_cut} cuts into up to {MAX_CUTS}, the fp32 norm is always the same")
    report.data("largest relative error", worst)
    _repeat(sums, device, report)


def _views(matrix: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    rows, cols = matrix.shape
    third, half = max(1, rows // 3), max(1, cols // 2)
    return {
        "contiguous": [matrix],
        "rows of query, key and value": [
            part for part in (matrix[:third], matrix[third : 2 * third], matrix[2 * third :])
            if part.numel()
        ],
        "columns": [part for part in (matrix[:, :half], matrix[:, half:]) if part.numel()],
        "columns of some rows": [matrix[: max(1, rows // 2), cols - half :]],
    }  # fmt: skip


def _compare_cuts(sums: SumOfSquares, matrix: torch.Tensor, seed: int, report: Report) -> int:
    """Cut into 1 to 8 by rows and by columns; return how many cuts there were."""
    (whole,) = sums([matrix])
    expected = whole.sqrt().float()
    count = 0
    for dim in (0, 1):
        for pieces in _cut(matrix, dim, random.Random(seed)):
            found = torch.stack(list(sums(pieces))).sum().sqrt().float()
            count += 1
            report.expect(
                torch.equal(found, expected),
                f"{tuple(matrix.shape)} cut into {len(pieces)} along dimension {dim}: expected the "
                f"fp32 norm {expected.item()!r}, got {found.item()!r}",
            )
    return count


def _cut(matrix: torch.Tensor, dim: int, rng: random.Random) -> Iterator[Sequence[torch.Tensor]]:
    size = matrix.shape[dim]
    for num_pieces in range(1, min(MAX_CUTS, size) + 1):
        cuts = [0, *sorted(rng.sample(range(1, size), num_pieces - 1)), size]
        yield [
            matrix.narrow(dim, first, last - first)
            for first, last in zip(cuts, cuts[1:], strict=False)
        ]


def _repeat(sums: SumOfSquares, device: torch.device, report: Report) -> None:
    """Sum again and again, in deterministic mode too."""
    matrix = torch.randn(513, 1025, generator=torch.Generator().manual_seed(0)).to(device)
    views = [matrix, matrix[:, 5:], matrix[7:]]
    bits: set[tuple[float, ...]] = set()
    norms: set[tuple[float, ...]] = set()
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            for _ in range(REPEATS):
                found = torch.stack(list(sums(views)))
                bits.add(tuple(found.tolist()))
                norms.add(tuple(found.sqrt().float().tolist()))
        finally:
            torch.use_deterministic_algorithms(False)
    report.expect(
        len(norms) == 1,
        f"expected one fp32 norm in {2 * REPEATS} repeats, deterministic or not, got {len(norms)}",
    )
    report.figure(f"{2 * REPEATS} repeats, deterministic or not: {len(bits)} float64 result")
