# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Write metrics of Muon's steps to the TensorBoard and W&B writers of a trainer."""

import sys
from typing import Any

from megatron_muon.step.muon_step import MuonStep


class MetricsLog:
    """Metrics of every ``--tensorboard-log-interval``-th iteration.

    Args:
        muon_step: Step whose metrics are recorded.

    Attributes:
        bridge_state: ``GlobalState`` of Megatron-Bridge's trainer; None for Megatron-LM's.

    Communication: at each of these iterations a gather of objects, see
        ``MuonStep.last_metrics()``.
    """

    bridge_state: Any = None

    def __init__(self, muon_step: MuonStep) -> None:
        self._muon_step = muon_step
        muon_step.record_metrics()

    def write(self) -> None:
        """Write the metrics of the step that has just ended; called by all ranks together.

        Their names are ``muon/METRIC``, or ``muon/METRIC/GROUP`` with several parameter groups.
        """
        iteration, interval, tensorboard, wandb = self._run()
        if iteration is None or iteration % interval:
            return
        values = {
            f"muon/{name}" + f"/{group}" * (len(numbers) > 1): number
            for name, numbers in self._muon_step.last_metrics()._asdict().items()
            for group, number in enumerate(numbers)
        }
        # Megatron gives them to the last rank.
        if tensorboard is not None:
            for name, value in values.items():
                tensorboard.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log(values, iteration)

    def _run(self) -> tuple[Any, Any, Any, Any]:
        """Return the iteration of a trainer, its interval and writers; no iteration outside."""
        if state := self.bridge_state:
            interval = state.cfg.logger.tensorboard_log_interval
            iteration = state.train_state.step + 1
            return iteration, interval, state.tensorboard_logger, state.wandb_logger
        # Not imported: a script on megatron-core alone must not load megatron.training.
        variables = sys.modules.get("megatron.training.global_vars")
        args: Any = getattr(variables, "_GLOBAL_ARGS", None)
        if variables is None or not hasattr(args, "curr_iteration"):
            return None, None, None, None
        writers = variables.get_tensorboard_writer(), variables.get_wandb_writer()
        return args.curr_iteration + 1, args.tensorboard_log_interval, *writers
