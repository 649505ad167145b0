# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train through the launcher, as a user does, and read the log."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from training_log import TrainingLog

CPU_RANKS = Path(__file__).resolve().parent / "cpu_ranks"
PRETRAIN_GPT = Path(__file__).resolve().parent / "pretrain_gpt.py"


def launcher(on_cpu: bool) -> list[str]:
    """Return how torchrun starts the launcher, on CPU ranks or on GPUs."""
    return [str(CPU_RANKS)] if on_cpu else ["-m", "megatron_muon"]


def train(
    ranks: int,
    arguments: Sequence[str],
    *,
    script: Path = PRETRAIN_GPT,
    on_cpu: bool = True,
    environment: Mapping[str, str] | None = None,
) -> TrainingLog:
    """Run a training script under torchrun and the launcher.

    Args:
        ranks: Processes on this machine.
        arguments: Megatron's flags.
        script: The script.
        on_cpu: Run on CPU ranks, by :mod:`cpu_ranks`, in place of GPUs.
        environment: Variables to set beside those of this process.

    Raises:
        RuntimeError: The run failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *launcher(on_cpu), str(script), *arguments]
    # Megatron prints losses on standard output and its timers on standard error.
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"exit code {done.returncode}: {' '.join(command)}\n{done.stdout[-4000:]}"
        )
    log = TrainingLog()
    for line in done.stdout.splitlines():
        log.feed(line)
    return log
