# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Times, bytes, memory and calls of a plan by rank."""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import section_size
from megatron_muon.plan.staging import PlanStaging, StagingLayout
from megatron_muon.tools.plan.sizes import SizeCounter, Traffic, messages_to
from megatron_muon.tools.plan.timeline import Round, Span, timeline


@dataclass
class RankReport:
    """Figures of one rank.

    Args:
        rank: Rank of the job.
        bytes_sent: Bytes of rows to owners, and of results sent back.
        bytes_received: Bytes received from others.
        staging_bytes: Memory of messages and stacks while a step runs; nothing stays between steps.
        workspace_bytes: Memory of Newton-Schulz beside them, of the largest stack.
        num_calls: Calls of Newton-Schulz, one per stack.
        local_ns: Estimated Newton-Schulz of local matrices.
        rounds: Estimated times, by plan and bucket.
        spans: Estimated step.
        newton_schulz_ns: Estimated Newton-Schulz time.
        traffic_ns: Estimated time of its messages.
        step_ns: Estimated step, waits for messages included.
    """

    rank: int
    bytes_sent: int = 0
    bytes_received: int = 0
    staging_bytes: int = 0
    workspace_bytes: int = 0
    num_calls: int = 0
    local_ns: int = 0
    rounds: list[list[Round]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    newton_schulz_ns: int = 0
    traffic_ns: int = 0
    step_ns: int = 0


@dataclass
class Report:
    """Figures of a job.

    Args:
        ranks: Figures by rank.
        matrices: ``name`` and ``owners`` by matrix.
        num_elements: Elements of all matrices.
        moved_fraction: Elements sent to owners over all elements.
        busiest_over_ideal: Newton-Schulz time of the busiest rank, over the time if all matrices,
            none split, were spread evenly.
    """

    ranks: list[RankReport]
    matrices: list[dict[str, Any]]
    num_elements: int
    moved_fraction: float
    busiest_over_ideal: float


def build_report(num_ranks: int, plans: Sequence[ExchangePlan]) -> Report:
    """Add up the plans of all domains of a job, or one plan, by rank."""
    # Ranks without a matrix count too: they wait for the others, and may still send rows.
    ranks = [RankReport(rank) for rank in range(num_ranks)]
    num_moved, num_ns, staging = 0, 0, defaultdict[int, list[PlanStaging]](list)
    for plan in plans:
        for matrix in plan.matrices:
            num_ns += sum(plan.cost.newton_schulz_ns(*shape) for shape in matrix.blocks)
        counter = SizeCounter(plan)
        num_moved += _add_plan(ranks, counter)
        for rank, of_plan in counter.staging().items():
            staging[rank].append(of_plan)
    # Most ranks stage the same.
    layout_of = functools.cache(StagingLayout.build)
    for report in ranks:
        report.staging_bytes = layout_of(tuple(staging[report.rank])).num_bytes
        report.spans = timeline(report.local_ns, report.rounds)
        report.step_ns = round(max((span.end for span in report.spans), default=0))
        rounds = [*itertools.chain(*report.rounds)]
        report.newton_schulz_ns = report.local_ns + sum(times.newton_schulz for times in rounds)
        report.traffic_ns = sum(times.rows + times.results for times in rounds)
    matrices = [pair for plan in plans for pair in zip(plan.matrices, plan.owners, strict=True)]
    num_elements = sum(matrix.num_elements for matrix, _ in matrices)
    busiest_ns = max(report.newton_schulz_ns for report in ranks)
    ideal_ns = num_ns // num_ranks
    return Report(
        ranks,
        [{"name": matrix.name, "owners": owners} for matrix, owners in matrices],
        num_elements,
        num_moved / max(1, num_elements),
        busiest_ns / ideal_ns if ideal_ns else 1.0,
    )


def _add_plan(ranks: Sequence[RankReport], counter: SizeCounter) -> int:
    """Add the work and the messages of a plan, and return the number of elements sent to owners."""
    plan = counter.plan
    for rank, time_ns in _add_calls(ranks, plan, plan.local).items():
        ranks[rank].local_ns += time_ns
    for rank in plan.ranks:
        ranks[rank].rounds.append([])
    num_moved = 0
    for bucket in plan.buckets:
        in_bucket, *times = _add_traffic(ranks, counter, bucket)
        times.append(_add_calls(ranks, plan, bucket))
        num_moved += in_bucket
        for rank in plan.ranks:
            ranks[rank].rounds[-1].append(Round(*(times_ns[rank] for times_ns in times)))
    return num_moved


def _add_traffic(
    ranks: Sequence[RankReport], counter: SizeCounter, bucket: Sequence[int]
) -> tuple[int, Counter[int], Counter[int]]:
    """Add rows and results of a bucket, and the all-gathers of replicas.

    Returns:
        The number of elements sent to owners, and the estimated times of rows and of results by
        rank, in the busier direction.
    """
    plan = counter.plan
    cost, dtypes = plan.cost, plan.dtypes
    rows_ns, results_ns = Counter[int](), Counter[int]()
    rows, results_by_shard = counter.traffic(bucket)
    results = Traffic(Counter(), Counter())
    for holders, by_owner in results_by_shard.items():
        for owner, holder, elements in messages_to(holders, by_owner):
            if owner != holder:
                results.add(owner, holder, elements, cost.is_on_one_node((owner, holder)))
        section_bytes = dtypes.scatter_bytes * section_size(len(holders), by_owner.total())
        passed_on = section_bytes * (len(holders) - 1)
        time_ns = all_gather_ns(cost, holders, section_bytes * len(holders))
        for holder in holders:
            ranks[holder].bytes_sent += passed_on
            ranks[holder].bytes_received += passed_on
            results_ns[holder] += time_ns
    for times_ns, traffic, width in (
        (rows_ns, rows, dtypes.gather_bytes),
        (results_ns, results, dtypes.scatter_bytes),
    ):
        for rank in plan.ranks:
            sent, received = (
                [width * elements[rank, on_node] for on_node in (True, False)]
                for elements in traffic
            )
            ranks[rank].bytes_sent += sum(sent)
            ranks[rank].bytes_received += sum(received)
            times_ns[rank] += max(messages_ns(cost, *sent), messages_ns(cost, *received))
    return rows.sent.total() // dtypes.num_inputs, rows_ns, results_ns


def all_gather_ns(cost: CostModel, ranks: Sequence[int], num_bytes: int) -> int:
    """Estimate an all-gather with this many bytes of output.

    Every byte enters a node once, over the links of all ranks there.
    Source: "bus bandwidth" of doc/PERFORMANCE.md of NVIDIA/nccl-tests.
    """
    gbps = cost.gbps
    if not cost.is_on_one_node(ranks):
        fewest = min(Counter(map(cost.node, ranks)).values())
        gbps = min(gbps, fewest * cost.gbps_between_nodes)
    return round(num_bytes * (len(ranks) - 1) / len(ranks) / gbps)


def messages_ns(cost: CostModel, on_node_bytes: int, off_node_bytes: int) -> int:
    """Estimate the messages of one rank in one direction, to its node and to others."""
    return round(on_node_bytes / cost.gbps + off_node_bytes / cost.gbps_between_nodes)


def _add_calls(
    ranks: Sequence[RankReport], plan: ExchangePlan, indices: Sequence[int]
) -> Counter[int]:
    """Add the Newton-Schulz calls of some matrices, and return their times by rank.

    Stacks count as they are, full or not.
    """
    times_ns: Counter[int] = Counter()
    for rank, stacks in plan.stacks(indices).items():
        report = ranks[rank]
        report.num_calls += len(stacks)
        for stack in stacks:
            part = stack[0]
            shape = plan.matrices[part.matrix].blocks[part.block]
            on_node = plan.cost.is_on_one_node(part.owners)
            products, launches, all_reduces = plan.cost.costs_ns(
                *shape, len(part.owners), on_node=on_node
            )
            times_ns[rank] += len(stack) * products + launches + all_reduces
            # As Backend.workspace_bytes in a run.
            num_stacks, num_squares = BACKENDS[plan.cost.backend].workspace
            num_elements = num_stacks * sum(each.num_rows * each.num_cols for each in stack)
            num_elements += num_squares * len(stack) * min(shape) ** 2
            workspace_bytes = num_elements * plan.dtypes.gather_bytes
            report.workspace_bytes = max(report.workspace_bytes, workspace_bytes)
    return times_ns
