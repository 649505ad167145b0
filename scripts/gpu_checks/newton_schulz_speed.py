# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""TFLOP/s of Newton-Schulz by shape and batch."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_checks import reference
from gpu_checks.report import Context, Report
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.registry import BACKENDS
from megatron_muon.plan.cost import CostModel

_SIDES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_MAX_ELEMENTS = 2**28
_TINY = (16, 32)
# Each shape is timed for as long, at least three times.
_TIMED_S = 0.05


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
    call = Call(reference.settings(), shape, is_normalized=True)
    return median_seconds(lambda: BACKENDS["standard"].run(stack, call))


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
