# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Write metrics of Muon's steps to the TensorBoard and W&B writers of a trainer."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_muon.step.muon_step import MuonStep


class LoggedRun(NamedTuple):
    """An iteration of a trainer, and its writers.

    Args:
        iteration: Number of the iteration, from 1 on.
        interval: Iterations between entries of the log.
        tensorboard: Writer; None on other ranks than the last, and without a folder.
        wandb: The same for W&B.
    """

    iteration: int
    interval: int
    tensorboard: Any
    wandb: Any


def run_of_megatron_lm() -> LoggedRun | None:
    """Return the iteration that Megatron-LM's trainer runs; None outside of it."""
    # Not imported: a script on megatron-core alone must not load megatron.training.
    global_vars = sys.modules.get("megatron.training.global_vars")
    args: Any = getattr(global_vars, "_GLOBAL_ARGS", None)
    if global_vars is None or not hasattr(args, "curr_iteration"):
        return None
    return LoggedRun(
        args.curr_iteration + 1,
        args.tensorboard_log_interval,
        global_vars.get_tensorboard_writer(),
        global_vars.get_wandb_writer(),
    )


class MetricsLog:
    """Metrics of every ``--tensorboard-log-interval``-th iteration.

    Args:
        muon_step: Step whose metrics are recorded.

    Attributes:
        run: Returns the iteration of the trainer; None outside of it.

    Communication: at each of these iterations a gather of objects, see
        ``MuonStep.last_metrics()``.
    """

    def __init__(self, muon_step: MuonStep) -> None:
        self._muon_step = muon_step
        self.run: Callable[[], LoggedRun | None] = run_of_megatron_lm
        muon_step.record_metrics()

    def write(self) -> None:
        """Write the metrics of the step that has just ended; called by all ranks together.

        By ``muon/METRIC``, and ``muon/METRIC/GROUP`` of several parameter groups.
        """
        run = self.run()
        if run is None or run.iteration % run.interval:
            return
        values = {}
        for name, value in self._muon_step.last_metrics()._asdict().items():
            numbers = value if isinstance(value, tuple) else (value,)
            for group, number in enumerate(numbers):
                values[f"muon/{name}" + f"/{group}" * (len(numbers) > 1)] = number
        # Megatron gives them to the last rank.
        if run.tensorboard is not None:
            for name, value in values.items():
                run.tensorboard.add_scalar(name, value, run.iteration)
        if run.wandb is not None:
            run.wandb.log(values, run.iteration)
