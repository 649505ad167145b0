# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Estimated step of one rank on its GPU and its links, and a picture of it."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from megatron_muon.plan.schedule import actions_of

# Colors that color-blind readers can tell apart.
_COLORS = {"Newton-Schulz": "#0072b2", "rows to owners": "#e69f00", "results": "#009e73"}
# What actions of a step begin, or wait for.
_MESSAGES = {
    "start_gather": "rows to owners",
    "wait_for_gather": "rows to owners",
    "start_scatter": "results",
    "finish_scatter": "results",
}
_LEFT, _WIDTH, _HEIGHT = 60, 660, 40


class Round(NamedTuple):
    """Estimated times of one bucket on one rank, ns.

    Args:
        rows: Rows to owners, in the busier direction.
        results: Results, in the busier direction, and all-gathers of replicas.
        newton_schulz: Newton-Schulz.
    """

    rows: int
    results: int
    newton_schulz: int


class Span(NamedTuple):
    """Time in which the GPU or the links of a rank are busy, ns since the step began.

    Args:
        kind: ``Newton-Schulz`` on the GPU; ``rows to owners`` or ``results`` on the links.
        start: When it starts.
        end: When it ends.
    """

    kind: str
    start: float
    end: float


def timeline(local_ns: int, rounds: Sequence[Sequence[Round]]) -> list[Span]:
    """Estimate the step of one rank whose peers keep pace with it.

    Messages are sent one after the other, as soon as the GPU starts them, and the GPU waits where
    the step does. Elementwise work, norms, packing and host time are left out.

    Args:
        local_ns: Newton-Schulz of local matrices.
        rounds: Times by plan and bucket.

    Returns:
        Spans in the order of the step's actions; the latest end is the end of the step.
    """
    actions = actions_of(tuple(map(len, rounds)))
    num_local = sum(action.kind == "local_matrices" for action in actions)
    spans: list[Span] = []
    gpu = links = 0.0
    ends: dict[tuple[str, int, int], float] = {}
    for kind, plan, number in actions:
        message = _MESSAGES.get(kind)
        if message is None:
            is_local = kind == "local_matrices"
            time_ns = local_ns / num_local if is_local else rounds[plan][number].newton_schulz
            spans.append(Span("Newton-Schulz", gpu, gpu + time_ns))
            gpu += time_ns
        elif kind.startswith("start"):
            times, start = rounds[plan][number], max(gpu, links)
            links = start + (times.rows if kind == "start_gather" else times.results)
            ends[message, plan, number] = links
            spans.append(Span(message, start, links))
        else:
            gpu = max(gpu, ends[message, plan, number])
    return [span for span in spans if span.end > span.start]


def draw(spans: Sequence[Span], title: str) -> str:
    """Return an SVG picture of a step, with the GPU above the links; gaps are idle."""
    end_ns = max(span.end for span in spans)
    # About eight ticks, at 1, 2 or 5 times a power of ten.
    power = 10 ** math.floor(math.log10(end_ns / 8))
    tick_ns = next(power * n for n in (1, 2, 5, 10) if power * n * 8 >= end_ns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} 210" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/><g fill="#333333">',
        f'<text x="{_LEFT}" y="24">{escape(title)}</text>',
    ]
    for number, kind in enumerate(_COLORS):
        x = _LEFT + 160 * number
        parts.append(f'<rect x="{x}" y="36" width="14" height="14" fill="{_COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="48">{kind}</text>')
    for number in range(int(end_ns // tick_ns) + 1):
        x = _LEFT + _WIDTH * number * tick_ns / end_ns
        parts.append(f'<path d="M{x:.1f},60V172" stroke="#e4e4e4"/>')
        label = f"{number * tick_ns / 1e6:g}" + " ms" * (number == 0)
        parts.append(f'<text x="{x:.1f}" y="190" text-anchor="middle">{label}</text>')
    for y, lane in ((70, "GPU"), (122, "links")):
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 25}" text-anchor="end">{lane}</text>')
        parts += [
            f'<rect x="{_LEFT + _WIDTH * span.start / end_ns:.2f}" y="{y}" '
            f'width="{_WIDTH * (span.end - span.start) / end_ns:.2f}" height="{_HEIGHT}" '
            f'fill="{_COLORS[span.kind]}"/>'
            for span in spans
            if (span.kind == "Newton-Schulz") == (lane == "GPU")
        ]
    return "\n".join([*parts, "</g></svg>", ""])
