# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Write metrics of Muon's steps to the TensorBoard and W&B writers of Megatron's trainer."""

from megatron_muon.mcore.arguments import LoggedRun, logged_run
from megatron_muon.step.metrics import StepMetrics
from megatron_muon.step.muon_step import MuonStep


class MetricsLog:
    """Metrics of every ``--tensorboard-log-interval``-th iteration.

    Args:
        muon_step: Step whose metrics are recorded.

    Communication: at each of these iterations a gather of objects, see
        ``MuonStep.last_metrics()``.
    """

    def __init__(self, muon_step: MuonStep) -> None:
        self._muon_step, self._is_on = muon_step, False
        self._record(True)

    def _record(self, is_on: bool) -> None:
        """Record the next step or not: metrics take a pass over its tensors."""
        if is_on != self._is_on:
            self._muon_step.record_metrics(is_on)
        self._is_on = is_on

    def write(self) -> None:
        """Write the metrics of the step that has just ended; called by all ranks together."""
        run = logged_run()
        if run is None:
            return
        if run.iteration % run.interval == 0 and self._is_on:
            self._write(run)
        self._record((run.iteration + 1) % run.interval == 0)

    def _write(self, run: LoggedRun) -> None:
        values = by_name(self._muon_step.last_metrics())
        # Megatron gives them to the last rank.
        if run.tensorboard is not None:
            for name, value in values.items():
                run.tensorboard.add_scalar(name, value, run.iteration)
        if run.wandb is not None:
            run.wandb.log(values, run.iteration)


def by_name(metrics: StepMetrics) -> dict[str, float]:
    """Return metrics by ``muon/METRIC``, and ``muon/METRIC/GROUP`` of several parameter groups."""
    values = {}
    for name, value in metrics._asdict().items():
        numbers = value if isinstance(value, tuple) else (value,)
        for group, number in enumerate(numbers):
            values[f"muon/{name}" + f"/{group}" * (len(numbers) > 1)] = number
    return values
