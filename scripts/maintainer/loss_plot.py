# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Draw the loss curves of a quickstart: ``loss_plot.py results.json quickstart.svg``."""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Fixed per optimizer, not by position, and distinguishable for color-blind readers.
COLORS = {"muon": "#0072b2", "adam": "#d55e00", "soap": "#009e73"}
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 700, 40, 350


def draw(runs: Sequence[dict[str, Any]]) -> str:
    """Return a picture of training losses (thick: mean of 10) and validation losses (dots).

    Args:
        runs: The quickstart's ``results.json``; a loss that diverged is None, and left out.
    """
    all_losses = [loss for run in runs for loss in run["losses"].values() if loss is not None]
    low, high = math.floor(2 * min(all_losses)) / 2, math.ceil(2 * max(all_losses)) / 2
    last = max(int(iteration) for run in runs for iteration in run["losses"])

    def place(iteration: float, loss: float) -> tuple[float, float]:
        """Return the position of a point in the picture."""
        y = BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low)
        return round(LEFT + (RIGHT - LEFT) * iteration / last, 1), round(y, 1)

    def curve(losses: dict[int, float], style: str) -> str:
        """Return a line through all points."""
        points = " ".join("{},{}".format(*place(*point)) for point in losses.items())
        return f'<polyline {style} points="{points}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        '<g fill="#333333">',
    ]
    for half in range(round(2 * low), round(2 * high) + 1):
        y = place(0, half / 2)[1]
        parts.append(f'<path d="M{LEFT},{y}H{RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{half / 2:g}</text>')
    for iteration in sorted({last * sixth // 6 for sixth in range(7)}):
        x = place(iteration, low)[0]
        parts.append(f'<text x="{x}" y="{BOTTOM + 20}" text-anchor="middle">{iteration}</text>')
    parts.append(f'<text x="{RIGHT}" y="{BOTTOM + 40}" text-anchor="end">iteration</text>')
    title = "loss, nats per byte (thin: training; thick: its mean of 10; dots: validation)"
    parts += [f'<text x="{LEFT - 8}" y="{TOP - 18}">{title}</text>', "</g>"]
    for number, run in enumerate(runs):
        color = next(c for name, c in COLORS.items() if run["optimizer"].lower().startswith(name))
        losses = {int(i): loss for i, loss in run["losses"].items() if loss is not None}
        means = {
            i: statistics.fmean(losses[j] for j in range(i - 9, i + 1) if j in losses)
            for i in losses
        }
        parts += ['<g fill="none">', curve(losses, f'stroke="{color}" stroke-opacity="0.6"')]
        parts.append(curve(means, f'stroke="{color}" stroke-width="2"'))
        for iteration, loss in run["validation_losses"].items():
            x, y = place(int(iteration), loss)
            parts.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{color}" stroke="white"/>')
        x, y = RIGHT - 260, TOP + 20 + 22 * number
        parts.append(f'<path d="M{x},{y - 4}h24" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<circle cx="{x + 12}" cy="{y - 4}" r="4.5" fill="{color}" stroke="white"/>')
        legend = f"{run['optimizer']}, learning rate {run['learning_rate']:g}"
        parts += [f'<text x="{x + 32}" y="{y}" fill="#333333">{legend}</text>', "</g>"]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
