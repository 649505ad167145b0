# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The table of a plan that users read."""

from collections.abc import Iterator

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.report.rank_report import Report, build_report

_MAX_RANKS_SHOWN = 16


def table(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    sent = sum(rank.bytes_sent for rank in report.ranks)
    working = sum(rank.load_ns > 0 for rank in report.ranks)
    split = f"{sum('owners' in matrix for matrix in report.matrices)} are split"
    if report.num_split_groups:
        split += (
            f", over {report.num_split_groups} sets of ranks, {report.max_split_groups} a rank at "
            "most"
        )
    yield (
        f"{len(report.matrices)} matrices, {report.num_elements / 1e6:,.1f} M elements, on "
        f"{report.world_size} ranks, {working} of which orthogonalize; {split}"
    )
    yield (
        f"Newton-Schulz: busiest rank {report.busiest_ns / 1e6:.3f} ms, ideal "
        f"{report.ideal_ns / 1e6:.3f} ms, ratio {report.busiest_over_ideal:.3f}; at most "
        f"{max(rank.num_calls for rank in report.ranks)} calls a rank"
    )
    if set(report.num_blocks) != {"standard"}:
        blocks = ", ".join(f"{name} {num}" for name, num in sorted(report.num_blocks.items()))
        yield f"Newton-Schulz by backend, blocks: {blocks}"
    bound = "none needed"
    if report.lower_bound_bytes:
        bound = f"{sent / report.lower_bound_bytes:.2f} x"
    yield (
        f"traffic: {report.moved_elements / max(1, report.num_elements):.1%} of elements move, "
        f"{sent / 1e6 / report.world_size:,.1f} MB a rank, {report.most_over_mean:.2f} x that at "
        f"most; lower bound {report.lower_bound_bytes / 1e6 / report.world_size:,.1f} MB "
        f"({bound}); norms {report.norm_bytes:,} bytes"
    )
    yield (
        f"step: {report.min_step_ns / 1e6:.3f} ms at least, in {report.num_buckets} buckets; host "
        f"time {report.host_ns / 1e6:.3f} ms"
    )
    yield "rank  matrices  Newton-Schulz ms  traffic ms  sent MB  received MB  staging MB"
    # Of many ranks only the busiest matter: they decide the step.
    shown = report.ranks
    if report.world_size > _MAX_RANKS_SHOWN:
        shown = sorted(report.ranks, key=lambda rank: (-rank.load_ns, rank.rank))
    for rank in shown[:_MAX_RANKS_SHOWN]:
        yield (
            f"{rank.rank:4d}  {rank.num_matrices:8d}  {rank.load_ns / 1e6:16.3f}  "
            f"{rank.traffic_ns / 1e6:10.3f}  {rank.bytes_sent / 1e6:7.1f}  "
            f"{rank.bytes_received / 1e6:11.1f}  {rank.staging_bytes / 1e6:10.1f}"
        )
    if report.world_size > _MAX_RANKS_SHOWN:
        yield f"... the {_MAX_RANKS_SHOWN} busiest of {report.world_size} ranks"


def log_lines(plan: ExchangePlan) -> list[str]:
    """Describe the plan of one domain of a live run."""
    ranks = plan.ranks
    return [
        f"Muon exchange plan of {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}:",
        *table(build_report(ranks, [plan])),
    ]
