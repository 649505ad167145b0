# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Every way to compute Newton-Schulz that this machine has: against float64, and its time."""

import time
from functools import partial

import torch

from gpu_checks import reference
from gpu_checks.exact import exact, relative_error, spectra
from gpu_checks.newton_schulz_speed import median_seconds
from gpu_checks.report import Context, Report
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.registry import BACKENDS, usable_backends
from megatron_muon.plan.cost import CostModel

_SHAPE = (512, 2048)
# Largest errors of the Frobenius norm: steps in bf16 on the hardest matrix have 0.15, the Gram form
# in fp16 0.02 (docs/newton_schulz.md).
_LARGEST = {"standard": 0.25, "symmetric": 0.25, "gram": 0.05, "gram_symmetric": 0.05}
_TIMED = (
    *((1024, 1024), (1024, 4096), (2048, 2048), (2048, 7168), (4096, 4096), (4096, 14336)),
    *((4096, 28672), (7168, 18432), (8192, 8192), (8192, 28672)),
)
_TINY = ((16, 32),)


def check(context: Context, report: Report) -> None:
    """Compare each backend with the exact polynomial of singular values in float64."""
    device = torch.device(context.device)
    settings = reference.settings()
    usable, reasons = usable_backends("auto", settings, device)
    for reason in reasons:
        report.leave_out(*reason.removeprefix("Newton-Schulz ").split(": ", 1))
    names = [name for name in usable if name in _LARGEST]
    rows = []
    for kind, matrix in spectra(*_SHAPE).items():
        x = reference.normalized_bf16(matrix.float().to(device))
        expected, _ = exact(x, settings.steps, settings.coefficient_type)
        cells = [kind]
        for name in names:
            call = Call(settings, _SHAPE, is_normalized=True)
            error = relative_error(BACKENDS[name].run(x.unsqueeze(0), call)[0], expected)
            cells.append(f"{error:.4f}")
            report.expect(
                error <= _LARGEST[name],
                f"{name}, {kind}: expected an error of at most {_LARGEST[name]}, got {error:.3f}",
            )
        rows.append(cells)
    report.table("Error against float64", ("512 x 2048", *names), rows)
    report.figure(f"{', '.join(names)} on {len(rows)} spectra")


def check_speed(context: Context, report: Report) -> None:
    """Time each backend beside the standard steps, compilation apart."""
    device = torch.device(context.device)
    settings = reference.settings()
    names = [name for name in usable_backends("auto", settings, device)[0] if name in _LARGEST]
    others = [name for name in names if name != "standard"]
    cost = CostModel()
    begin = time.monotonic()
    rows, data = [], []
    for shape in _TINY if context.is_rehearsal else _TIMED:
        name_of_shape = f"{shape[0]} x {shape[1]}"
        if time.monotonic() - begin > 0.6 * context.limit_s:
            report.leave_out(name_of_shape, "no time left, as kernels are compiled")
            continue
        stack = torch.randn(1, *shape, device=device) / (shape[0] * shape[1]) ** 0.5
        stack = stack.bfloat16()
        call = Call(settings, shape, is_normalized=True)
        seconds = {}
        for name in names:
            if not BACKENDS[name].takes(*shape):
                continue
            run = BACKENDS[name].run
            seconds[name] = median_seconds(partial(run, stack, call))
        flops = {name: cost.work(*shape, 1, name).flops for name in seconds}
        cells = [name_of_shape, f"{seconds['standard'] * 1e3:.2f}"]
        for name in others:
            if name in seconds:
                ratio = seconds[name] / seconds["standard"]
                cells.append(f"{ratio:.2f} ({flops[name] / flops['standard']:.2f})")
            else:
                cells.append("")
        rows.append(cells)
        data.append([*shape, seconds])
        report.table(
            "Time over the standard steps (operations over theirs)",
            ("shape", "standard ms", *others),
            rows,
        )
        report.data("rows, columns, seconds by backend", data)
    report.figure(f"{', '.join(others)} beside standard on {len(rows)} shapes")
