# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read the numbers of a training run from Megatron's log lines."""

import re
import statistics
from dataclasses import dataclass, field

ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|")
STEP_MS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
LOSS = re.compile(r"lm loss: (\S+)")
VALIDATION = re.compile(r"validation loss at iteration (\d+).*?\| lm loss value: (\S+)")
OPTIMIZER_MS = re.compile(r"^ *optimizer \.*: ([\d.]+)$")
INNER_STEP_MS = re.compile(r"^ *optimizer-inner-step \.*: ([\d.]+)$")
SAVE_MS = re.compile(r"^ *save-checkpoint \.*: ([\d.]+)$")
LOAD_MS = re.compile(r"^ *load-checkpoint \.*: ([\d.]+)$")


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
    inner_step_ms: dict[int, float] = field(default_factory=dict)
    save_ms: dict[int, float] = field(default_factory=dict)
    load_ms: float = float("nan")
    iteration: int = 0

    def feed(self, line: str) -> bool:
        """Read one line; return whether it ended an iteration."""
        line = line.rstrip("\n")
        if match := ITERATION.search(line):
            self.iteration = int(match[1])
            loss, step_ms = LOSS.search(line), STEP_MS.search(line)
            self.losses[self.iteration] = float(loss[1]) if loss else float("nan")
            if step_ms:
                self.step_ms[self.iteration] = float(step_ms[1])
            return True
        if match := OPTIMIZER_MS.match(line):
            self.optimizer_ms[self.iteration] = float(match[1])
        elif match := INNER_STEP_MS.match(line):
            self.inner_step_ms[self.iteration] = float(match[1])
        elif match := SAVE_MS.match(line):
            self.save_ms[self.iteration] = float(match[1])
        elif match := LOAD_MS.match(line):
            self.load_ms = float(match[1])
        elif match := VALIDATION.search(line):
            self.validation_losses[int(match[1])] = float(match[2])
        return False

    def mean_loss(self, iteration: int, num_iterations: int = 10) -> float:
        """Return the mean training loss of the last iterations up to ``iteration``."""
        first = max(1, iteration - num_iterations + 1)
        return statistics.fmean(
            self.losses.get(i, float("nan")) for i in range(first, iteration + 1)
        )

    def final_validation_loss(self) -> float:
        """Return the last validation loss, NaN where there is none."""
        if not self.validation_losses:
            return float("nan")
        return self.validation_losses[max(self.validation_losses)]

    def median_step_ms(self) -> float:
        """Return the median time of an iteration; the first few, which allocate, do not count."""
        return _median(self.step_ms)

    def median_optimizer_ms(self) -> float:
        """Return the median time of the optimizer's part of an iteration, slowest rank."""
        return _median(self.optimizer_ms)

    def median_inner_step_ms(self) -> float:
        """Return the median time of the inner optimizers' steps, slowest rank."""
        return _median(self.inner_step_ms)


def _median(by_iteration: dict[int, float], num_skipped: int = 5) -> float:
    settled = [value for i, value in by_iteration.items() if i > num_skipped]
    return statistics.median(settled or by_iteration.values()) if by_iteration else float("nan")
