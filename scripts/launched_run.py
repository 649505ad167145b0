# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train through the launcher, as a user does, and read the numbers of Megatron's log lines."""

import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CPU_RANKS = Path(__file__).resolve().parent / "cpu_ranks"
PRETRAIN_GPT = Path(__file__).resolve().parent / "pretrain_gpt.py"

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|")
_STEP_MS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"lm loss: (\S+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+).*?\| lm loss value: (\S+)")
_TIMER = re.compile(r"^ *(optimizer|save-checkpoint|load-checkpoint) \.*: (\S+)")


@dataclass
class TrainingLog:
    """Numbers of one run by iteration; feed it the log line by line.

    Megatron prints a line an iteration, then that iteration's timers (``--logging-level 20
    --timing-log-level 1 --timing-log-option max``). A NaN loss it leaves out.
    """

    losses: dict[int, float] = field(default_factory=dict)
    validation_losses: dict[int, float] = field(default_factory=dict)
    step_ms: dict[int, float] = field(default_factory=dict)
    optimizer_ms: dict[int, float] = field(default_factory=dict)
    save_ms: dict[int, float] = field(default_factory=dict)
    load_ms: float = math.nan
    iteration: int = 0

    def feed(self, line: str) -> bool:
        """Read one line; return whether it ended an iteration."""
        if match := _ITERATION.search(line):
            self.iteration = int(match[1])
            loss, step_ms = _LOSS.search(line), _STEP_MS.search(line)
            self.losses[self.iteration] = float(loss[1]) if loss else math.nan
            if step_ms:
                self.step_ms[self.iteration] = float(step_ms[1])
            return True
        if match := _VALIDATION.search(line):
            self.validation_losses[int(match[1])] = float(match[2])
        elif match := _TIMER.match(line):
            if match[1] == "load-checkpoint":
                self.load_ms = float(match[2])
            else:
                timers = {"optimizer": self.optimizer_ms, "save-checkpoint": self.save_ms}
                timers[match[1]][self.iteration] = float(match[2])
        return False

    def mean_loss(self, iteration: int) -> float:
        """Return the mean training loss of the last ten iterations up to ``iteration``."""
        last = range(max(1, iteration - 9), iteration + 1)
        return statistics.fmean(self.losses.get(i, math.nan) for i in last)


def settled_median(by_iteration: Mapping[int, float]) -> float:
    """Return the median over iterations; the first five, which allocate, do not count."""
    settled = [value for i, value in by_iteration.items() if i > 5]
    return statistics.median(settled or by_iteration.values()) if by_iteration else math.nan


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
        on_cpu: Run on CPU ranks, by ``cpu_ranks``, in place of GPUs.
        environment: Variables to set beside those of this process.
        log_file: Where the command and all that the ranks print goes.
        on_iteration: Called after each iteration.

    Raises:
        RuntimeError: The run failed; with the end of what it printed.
    """
    launcher = [str(CPU_RANKS)] if on_cpu else ["-m", "megatron_muon"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *launcher, str(script), *arguments]
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
