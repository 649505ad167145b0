# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train through the launcher, as a user does, and read the log."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
    log_file: Path | None = None,
    on_iteration: Callable[[TrainingLog], None] = lambda log: None,
) -> TrainingLog:
    """Run a training script under torchrun and the launcher.

    Args:
        ranks: Processes on this machine.
        arguments: Megatron's flags.
        script: The script.
        on_cpu: Run on CPU ranks, by :mod:`cpu_ranks`, in place of GPUs.
        environment: Variables to set beside those of this process.
        log_file: Where the command and all that the ranks print goes.
        on_iteration: Called after each iteration.

    Raises:
        RuntimeError: The run failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *launcher(on_cpu), str(script), *arguments]
    log, tail = TrainingLog(), ""
    with (
        open(log_file or os.devnull, "w") as file,
        # Megatron prints losses on standard output and its timers on standard error.
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
        ) as process,
    ):
        file.write(shlex.join(command) + "\n")
        try:
            for line in process.stdout or ():
                file.write(line)
                tail = (tail + line)[-4000:]
                if log.feed(line):
                    on_iteration(log)
        except BaseException:
            # torchrun then ends its ranks, which leaving the context waits for.
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {shlex.join(command)}\n{tail}")
    return log
