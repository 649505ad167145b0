# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Draw metrics of runs: ``metrics_plot.py NAME=TENSORBOARD_DIR ... metrics.svg``.

Draws Muon's metrics, or from ``soak.json`` the losses of ``tests/functional/soak.py``:
``metrics_plot.py soak.json soak.svg``.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Distinguishable for color-blind readers.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
PANELS = ("update_rms", "gradient_norms", "momentum_norms")
WIDTH, HEIGHT, GAP = 320, 130, 44

type Curves = Mapping[str, Sequence[tuple[int, float]]]


def read(folder: Path) -> Curves:
    """Return steps and values of the metrics of a run, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        panel: [(event.step, event.value) for event in events.Scalars(f"muon/{panel}")]
        for panel in PANELS
    }


def draw(runs: Mapping[str, Curves]) -> str:
    """Return a picture with a panel per metric, each from 0 to its highest value."""
    panels = list(dict.fromkeys(panel for run in runs.values() for panel in run))
    total = (2 * (WIDTH + GAP) + GAP, (len(panels) + 1) // 2 * (HEIGHT + GAP) + 2 * GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, name in enumerate(runs):
        x = GAP + (total[0] - GAP) // len(runs) * number
        parts.append(f'<path d="M{x},18h24" stroke="{COLORS[number]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 32}" y="22" fill="#333333">{name}</text>')
    last = max(step for run in runs.values() for curve in run.values() for step, _ in curve)
    for number, panel in enumerate(panels):
        left = GAP + number % 2 * (WIDTH + GAP)
        top = 2 * GAP + number // 2 * (HEIGHT + GAP)
        high = max(value for run in runs.values() for _, value in run.get(panel, ()))
        parts.append(f'<g fill="#333333"><text x="{left}" y="{top - 8}">{panel}</text>')
        for share in (0, 0.5, 1):
            y = top + HEIGHT * (1 - share)
            parts.append(f'<path d="M{left},{y}h{WIDTH}" stroke="#e4e4e4"/>')
            label = f'text-anchor="end">{high * share:.2f}</text>'
            parts.append(f'<text x="{left - 4}" y="{y + 4}" {label}')
        for step in (1, last):
            x = left + WIDTH * step / last
            label = f'text-anchor="{"start" if step == 1 else "end"}">{step}</text>'
            parts.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 16}" {label}')
        parts.append("</g>")
        for color, run in zip(COLORS, runs.values(), strict=False):
            points = " ".join(
                f"{left + WIDTH * step / last:.1f},{top + HEIGHT * (1 - value / high):.1f}"
                for step, value in run.get(panel, ())
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    if sys.argv[1].endswith(".json"):
        found = json.loads(Path(sys.argv[1]).read_text())
    else:
        named = (argument.partition("=") for argument in sys.argv[1:-1])
        found = {name: read(Path(folder)) for name, _, folder in named}
    Path(sys.argv[-1]).write_text(draw(found))
