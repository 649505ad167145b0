# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Estimated step of one rank on its GPU and its links, and a picture of it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import Messages, RankSchedule
from megatron_muon.plan.schedule import Action
from megatron_muon.report.rank_report import stack_ns

# Colors that color-blind readers can tell apart.
_COLORS = {"Newton-Schulz": "#0072b2", "rows to owners": "#e69f00", "results": "#009e73"}
_LEFT, _WIDTH, _HEIGHT = 60, 660, 40


class Span(NamedTuple):
    """Time in which the GPU or the links of a rank are busy, ns from the begin of the step.

    Args:
        kind: ``Newton-Schulz`` on the GPU; ``rows to owners`` or ``results`` on the links.
        start: Begin.
        end: End.
    """

    kind: str
    start: int
    end: int


def timeline(plans: Sequence[ExchangePlan], rank: int) -> list[Span]:
    """Estimate a step of one rank whose peers keep pace with it.

    Messages follow one another, each from when the GPU gets to it, and the GPU waits for their ends
    where the step does. Elementwise work, norms, packing and the host are left out.

    Args:
        plans: Plans of the job, in their order.
        rank: Rank of the job.

    Returns:
        Spans in the order of the step's actions; the latest end is the end of the step.
    """
    plans = [plan for plan in plans if rank in plan.ranks]
    schedule = RankSchedule.build(plans, rank)
    spans: list[Span] = []
    gpu_ns = links_ns = 0
    ends: dict[tuple[str, int, int], int] = {}
    for action in schedule.actions:
        message = (action.kind.rpartition("_")[2], action.plan, action.number)
        if action.kind in ("wait_for_gather", "finish_scatter"):
            gpu_ns = max(gpu_ns, ends[message])
        elif action.kind in ("start_gather", "start_scatter"):
            kind = "results" if action.kind == "start_scatter" else "rows to owners"
            start_ns = max(gpu_ns, links_ns)
            links_ns = start_ns + _message_ns(plans[action.plan], schedule, rank, action)
            ends[message] = links_ns
            spans.append(Span(kind, start_ns, links_ns))
        else:
            time_ns = _newton_schulz_ns(plans, schedule, action)
            spans.append(Span("Newton-Schulz", gpu_ns, gpu_ns + time_ns))
            gpu_ns += time_ns
    return [span for span in spans if span.end > span.start]


def _newton_schulz_ns(plans: Sequence[ExchangePlan], schedule: RankSchedule, action: Action) -> int:
    """Estimate the calls of Newton-Schulz in one action."""
    if action.kind == "local":
        local = schedule.local[action.number]
        owned = [(each.plan, schedule.rank_plans[each.plan].local[each.number]) for each in local]
    else:
        bucket = schedule.rank_plans[action.plan].buckets[action.number]
        owned = [(action.plan, bucket.owned)]
    return sum(stack_ns(plans[plan], stack) for plan, each in owned for stack in each.stacks)


def _message_ns(plan: ExchangePlan, schedule: RankSchedule, rank: int, action: Action) -> int:
    """Estimate the messages of one action in the busier direction, all-gathers included."""
    rank_plan = schedule.rank_plans[action.plan]
    if action.kind == "start_gather":
        bucket = rank_plan.buckets[action.number]
        width, sent, received = plan.dtypes.gather_bytes, bucket.sends, _elements(bucket.receives)
        all_gather_ns = 0
    else:
        scatter = rank_plan.scatters[action.number]
        width, sent, received = plan.dtypes.scatter_bytes, scatter.sends, scatter.receives
        shard = scatter.shard
        all_gather_ns = (
            plan.cost.all_gather_ns(shard.holders, width * shard.num_elements) if shard else 0
        )
    directions = []
    for elements in (_elements(sent), received):
        num_bytes = [0, 0]
        for peer, count in elements.items():
            if peer != rank:
                num_bytes[not plan.cost.share_a_node((peer, rank))] += width * count
        directions.append(plan.cost.messages_ns(*num_bytes))
    return max(directions) + all_gather_ns


def _elements(messages: Messages) -> Mapping[int, int]:
    return {peer: sum(r.num_elements for r in routes) for peer, routes in messages.items()}


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
        f'<text x="{_LEFT}" y="24">{title}</text>',
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
