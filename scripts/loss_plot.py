# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Draw the loss curves of a quickstart: ``loss_plot.py results.json quickstart.svg``."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training_log import TrainingLog

# Fixed per optimizer, not by position, and distinguishable for color-blind readers.
COLORS = {"muon": "#0072b2", "adam": "#d55e00"}
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 700, 40, 350


class Run(NamedTuple):
    """A run of the quickstart.

    Args:
        name: Of the optimizer.
        learning_rate: Of the run.
        log: Its losses.
    """

    name: str
    learning_rate: float
    log: TrainingLog


def read_runs(file: Path) -> list[Run]:
    """Read the numbers that the quickstart has written."""

    def by_iteration(values: dict[str, Any]) -> dict[int, float]:
        return {int(i): math.nan if value is None else value for i, value in values.items()}

    return [
        Run(
            run["optimizer"],
            run["learning_rate"],
            TrainingLog(
                losses=by_iteration(run["losses"]),
                validation_losses=by_iteration(run["validation_losses"]),
            ),
        )
        for run in json.loads(file.read_text())
    ]


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from ``low`` to ``high``."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def write_plot(runs: Sequence[Run], file: Path) -> None:
    """Draw the training loss (lines, thick: mean of 10) and the validation loss (dots)."""
    losses = [loss for run in runs for loss in run.log.losses.values() if math.isfinite(loss)]
    low, high = math.floor(2 * min(losses)) / 2, math.ceil(2 * max(losses)) / 2
    last = max(max(run.log.losses) for run in runs)

    def place(iteration: float, loss: float) -> tuple[float, float]:
        """Return the position of a point in the picture."""
        y = BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low)
        return round(LEFT + (RIGHT - LEFT) * iteration / last, 1), round(y, 1)

    def line(points: dict[int, float], style: str) -> str:
        """Return a curve through all points that are finite."""
        at = (place(*point) for point in points.items() if math.isfinite(point[1]))
        return f'<polyline {style} points="{" ".join(f"{x},{y}" for x, y in at)}"/>'

    def axes() -> Iterator[str]:
        """Yield a grid line and a number for each tick, and the names of the axes."""
        for loss in ticks(low, high):
            _, y = place(0, loss)
            yield f'<path d="M{LEFT},{y}H{RIGHT}" stroke="#e4e4e4"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{loss:g}</text>'
        for iteration in ticks(0, last):
            x, _ = place(iteration, low)
            yield f'<text x="{x}" y="{BOTTOM + 20}" text-anchor="middle">{iteration:g}</text>'
        yield f'<text x="{RIGHT}" y="{BOTTOM + 40}" text-anchor="end">iteration</text>'
        title = "loss, nats per byte (line: training, mean of 10; dots: validation)"
        yield f'<text x="{LEFT - 8}" y="{TOP - 18}">{title}</text>'

    def curves(number: int, run: Run) -> Iterator[str]:
        """Yield the curves of one run, and its line of the legend."""
        color, log = COLORS.get(run.name, "#555555"), run.log
        means = {i: log.mean_loss(i) for i in log.losses}
        yield line(log.losses, f'stroke="{color}" stroke-opacity="0.25"')
        yield line(means, f'stroke="{color}" stroke-width="2"')
        for point in log.validation_losses.items():
            x, y = place(*point)
            yield f'<circle cx="{x}" cy="{y}" r="4.5" fill="{color}" stroke="white"/>'
        x, y = RIGHT - 260, TOP + 20 + 22 * number
        yield f'<path d="M{x},{y - 4}h24" stroke="{color}" stroke-width="2"/>'
        yield f'<circle cx="{x + 12}" cy="{y - 4}" r="4.5" fill="{color}" stroke="white"/>'
        text = f"{run.name}, learning rate {run.learning_rate:g}"
        yield f'<text x="{x + 32}" y="{y}" fill="#333333">{text}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        '<g fill="#333333">',
        *axes(),
        "</g>",
    ]
    for number, run in enumerate(runs):
        parts += ['<g fill="none">', *curves(number, run), "</g>"]
    file.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    write_plot(read_runs(Path(sys.argv[1])), Path(sys.argv[2]))
