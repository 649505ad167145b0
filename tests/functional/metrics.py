# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: TensorBoard's events, and the golden values' file format."""

import json
from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing import event_accumulator

_ALL = {event_accumulator.TENSORS: 0, event_accumulator.SCALARS: 0}

# Values of a metric by iteration, fp32 as TensorBoard keeps them.
type Values = dict[int, float]


class MetricsError(ValueError):
    """A run left no metrics."""


def read_events(folder: Path, run: int) -> dict[str, Values]:
    """Read the scalars of one run.

    Args:
        folder: What ``--tensorboard-dir`` was.
        run: Which of the runs that wrote there, oldest first from 0; files without scalars, which
            some launchers leave, do not count.

    Raises:
        MetricsError: There is no such run.
    """
    runs = []
    for file in sorted(folder.glob("events*tfevents*"), key=lambda file: file.stat().st_mtime_ns):
        events = event_accumulator.EventAccumulator(str(file), size_guidance=_ALL).Reload()
        if names := events.Tags()["scalars"]:
            runs.append(
                {n: {event.step: event.value for event in events.Scalars(n)} for n in names}
            )
    if run >= len(runs):
        raise MetricsError(f"{folder}: expected the events of {run + 1} runs, got {len(runs)}.")
    return runs[run]


def write_golden(
    path: Path, metrics: dict[str, Values], train_iters: int, recorded_on: str | None = None
) -> None:
    """Write metrics in Megatron's format: a value an iteration, five decimals."""
    steps = range(1, train_iters + 1)
    kind = {"recorded_on": recorded_on} if recorded_on else {}
    golden = {
        name: {
            **kind,
            "start_step": 1,
            "end_step": train_iters,
            "step_interval": 1,
            "values": {str(i): round(found[i], 5) if i in found else "nan" for i in steps},
        }
        for name, found in metrics.items()
    }
    path.write_text(json.dumps(golden, indent=4) + "\n")


def read_golden(path: Path) -> dict[str, Values]:
    """Read a golden file; ``"nan"`` becomes infinity, as with Megatron."""
    return {
        name: {int(step): _number(value) for step, value in metric["values"].items()}
        for name, metric in json.loads(path.read_text()).items()
    }


def read_recorded_on(path: Path) -> str | None:
    """Return which kind of CPU recorded a golden file; None where that is not written there."""
    (kind,) = {metric.get("recorded_on") for metric in json.loads(path.read_text()).values()}
    return kind


def rounded(values: Values, steps: Iterable[int]) -> list[float]:
    """Give the values of these steps as a golden file has them; infinity where there is none."""
    return [round(values[i], 5) if i in values else float("inf") for i in steps]


def _number(value: float | str) -> float:
    return float("inf") if isinstance(value, str) else float(value)
