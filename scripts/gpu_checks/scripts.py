# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The training script on megatron-core alone, on one GPU or on two CPU ranks."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

from gpu_checks.ranks import run_ranks
from gpu_checks.report import Context, Report

SCRIPT = Path(__file__).resolve().parents[1] / "train_megatron_core.py"
_STEPS = 40
# It starts at the logarithm of 64 tokens, 4.2. The test on CPU ranks asks for 0.1.
_LAST_LOSS = 0.5


def check(context: Context, report: Report) -> None:
    """Train, and read the losses it prints."""
    world_size = 1 if context.device == "cuda" else 2
    printed = run_ranks(context, world_size, run_script, timeout_s=0.9 * context.limit_s)[0]
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)", printed, re.M)]
    report.data("losses", losses)
    report.expect(len(losses) > 1, f"expected losses, got {printed[-300:]!r}")
    if losses:
        report.figure(f"loss {losses[0]} to {losses[-1]} in {_STEPS} steps, {world_size} ranks")
        report.expect(losses[-1] < _LAST_LOSS, f"expected a loss below {_LAST_LOSS}")


def run_script() -> str:
    """Run the script on this rank, and return what it prints."""
    sys.argv = [str(SCRIPT), "--steps", str(_STEPS)]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.stdout.write(printed.getvalue())
    return printed.getvalue()
