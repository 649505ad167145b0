# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""TFLOP/s of Newton-Schulz by shape and batch, and of emerging-optimizers' symmetric kernels."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from gpu_checks import reference
from gpu_checks.report import Context, NotPossibleError, Report
from megatron_muon.newton_schulz.registry import BACKENDS
from megatron_muon.plan.cost import CostModel

_SIDES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_MAX_ELEMENTS = 2**28
_SYMMETRIC = ((4096, 4096), (4096, 14336), (8192, 8192))
# One set for all steps: the kernels are compiled anew for each.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = (16, 32)
# Each shape is timed for as long, at least three times.
_TIMED_S = 0.05
# Of the Frobenius norm; see newton_schulz_bits.
_TOLERANCE = 0.05


def check(context: Context, report: Report) -> None:
    """Time wide, tall and square matrices, one alone and in stacks."""
    sides = _TINY if context.is_rehearsal else _SIDES
    deadline = time.monotonic() + 0.8 * context.limit_s
    rows: list[list[str]] = []
    data = []
    for n in sides:
        for shape in ((n, n), (n, 4 * n), (4 * n, n)):
            cells = []
            for batch in _BATCHES:
                if batch * shape[0] * shape[1] > _MAX_ELEMENTS or time.monotonic() > deadline:
                    cells.append("")
                    continue
                seconds = _seconds(_stack(shape, batch, context), shape)
                flops = batch * CostModel().work(*shape).flops
                data.append([*shape, batch, seconds, flops / seconds / 1e12])
                cells.append(f"{flops / seconds / 1e12:.0f}")
            rows.append([f"{shape[0]} x {shape[1]}", *cells])
        report.data("rows, columns, batch, seconds, TFLOP/s", data)
    report.table(
        "Newton-Schulz in bf16, TFLOP/s", ("shape", *(f"stack of {n}" for n in _BATCHES)), rows
    )
    best = max(data, key=lambda row: row[-1])
    report.figure(
        f"{len(data)} sizes, up to {best[-1]:.0f} TFLOP/s ({best[0]} x {best[1]}, stack of "
        f"{best[2]})"
    )
    report.expect(time.monotonic() < deadline, "expected time for all sizes, got too little")


def _stack(shape: tuple[int, int], batch: int, context: Context) -> torch.Tensor:
    drawn = torch.randn(batch, *shape, device=context.device)
    # The norm of such a matrix is the root of its elements, nearly.
    return (drawn / (shape[0] * shape[1]) ** 0.5).bfloat16()


def _seconds(stack: torch.Tensor, shape: tuple[int, int]) -> float:
    def run() -> torch.Tensor:
        """Orthogonalize the stack."""
        return BACKENDS["standard"].run(
            stack, settings=reference.settings(), whole_shape=shape, is_normalized=True
        )

    return median_seconds(run)


def median_seconds(run: Callable[[], Any]) -> float:
    """Return the median time of a call on the device, by events."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < _TIMED_S and len(times) < 50):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(max(start.elapsed_time(stop) * 1e-3, 1e-9))
    return statistics.median(times)


def check_symmetric_kernels(context: Context, report: Report) -> None:
    """Time upstream's steps with symmetric products beside those with plain ones.

    Raises:
        NotPossibleError: Triton is missing, too old, or there is no GPU for it.
    """
    step = _symmetric_step(context)
    rows: list[list[str]] = []
    begin = time.monotonic()
    for shape in ((32, 64),) if context.is_rehearsal else _SYMMETRIC:
        if time.monotonic() - begin > 0.5 * context.limit_s:
            report.leave_out(f"{shape[0]} x {shape[1]}", "no time left, as kernels are compiled")
            continue
        x = _stack(shape, 1, context)[0]

        def run(chosen: Callable[..., torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
            """Take all steps."""
            for _ in range(reference.STEPS):
                x = chosen(x, *_COEFFICIENTS)
            return x

        start = time.monotonic()
        difference = reference.relative_difference(run(step), run(muon_utils.newton_schulz_step))
        compile_s = time.monotonic() - start
        plain_s = median_seconds(lambda: run(muon_utils.newton_schulz_step))  # noqa: B023
        symmetric_s = median_seconds(lambda: run(step))  # noqa: B023
        name = f"{shape[0]} x {shape[1]}"
        report.expect(
            difference <= _TOLERANCE,
            f"{name}: differs from plain products by {difference:.1e} of the norm",
        )
        rows.append(
            [name, f"{plain_s * 1e3:.2f}", f"{symmetric_s * 1e3:.2f}",
             f"{plain_s / symmetric_s:.2f}", f"{difference:.1e}", f"{compile_s:.0f}"]
        )  # fmt: skip
        report.table(
            "Symmetric kernels",
            ("shape", "plain ms", "symmetric ms", "times faster", "difference", "compiled in s"),
            rows,
        )
        report.data("rows", rows)
    report.figure(f"{rows[0][3]} to {rows[-1][3]} times faster than plain products")


def _symmetric_step(context: Context) -> Callable[..., torch.Tensor]:
    if context.is_rehearsal:
        return muon_utils.newton_schulz_step
    try:
        from emerging_optimizers import triton_kernels
    except ImportError as error:
        raise NotPossibleError(f"expected triton, got {error}") from None
    if not getattr(triton_kernels, "HAS_TRITON_340", False):
        raise NotPossibleError("expected triton 3.4.0 or newer, found none")
    return muon_utils.newton_schulz_step_tsyrk
