# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The training scripts on megatron-core alone and on plain FSDP2, on one GPU or two CPU ranks."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

from gpu_checks.ranks import run_ranks
from gpu_checks.report import Context, Report

_SCRIPTS = Path(__file__).resolve().parents[1]
SCRIPT = _SCRIPTS / "train_megatron_core.py"
_STEPS = 40


def check(context: Context, report: Report) -> None:
    """Train on megatron-core alone."""
    # It starts at the logarithm of 64 tokens, 4.2. The test on CPU ranks asks for 0.1.
    _check(context, report, SCRIPT, last_loss=0.5)


def check_fsdp2(context: Context, report: Report) -> None:
    """Train on plain FSDP2."""
    # It starts at 4.3, and is at 0.3 after 40 steps on CPU ranks.
    _check(context, report, _SCRIPTS / "train_fsdp2.py", last_loss=2.0)


def _check(context: Context, report: Report, script: Path, *, last_loss: float) -> None:
    """Train, and read the losses that a script prints."""
    world_size = 1 if context.device == "cuda" else 2
    printed = run_ranks(
        context, world_size, run_script, str(script), timeout_s=0.9 * context.limit_s
    )[0]
    losses = [float(loss) for loss in re.findall(r"^step +\d+:? +loss ([\d.]+)", printed, re.M)]
    report.data("losses", losses)
    report.expect(len(losses) > 1, f"expected losses, got {printed[-300:]!r}")
    if losses:
        report.figure(f"loss {losses[0]} to {losses[-1]} in {_STEPS} steps, {world_size} ranks")
        report.expect(losses[-1] < last_loss, f"expected a loss below {last_loss}")


def run_script(script: str = str(SCRIPT)) -> str:
    """Run a script on this rank, and return what it prints."""
    sys.argv = [script, "--steps", str(_STEPS)]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.write(printed.getvalue())
    return printed.getvalue()
