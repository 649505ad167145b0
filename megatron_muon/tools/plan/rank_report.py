# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Times, bytes, memory and calls of a plan by rank, and their table."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import MatrixShape
from megatron_muon.plan.routes import Part
from megatron_muon.plan.staging import PlanStaging, StagingLayout
from megatron_muon.tools.plan.sizes import SizeCounter, Traffic
from megatron_muon.tools.plan.timeline import Round, Span, timeline

_MAX_RANKS_SHOWN = 16


@dataclass
class RankReport:
    """Figures of one rank.

    Args:
        rank: Rank of the job.
        bytes_sent: Bytes of rows to owners, and of results sent back.
        bytes_received: Bytes received from others.
        staging_bytes: Memory of messages and stacks while a step runs; nothing stays between steps.
        workspace_bytes: Memory of Newton-Schulz beside them, of the largest stack.
        num_matrices: Owned matrices, parts included.
        num_calls: Calls of Newton-Schulz, one per stack.
        local_ns: Estimated Newton-Schulz of local matrices.
        rounds: Estimated times, by plan and bucket.
        step_ns: Estimated step, waits for messages included.
    """

    rank: int
    bytes_sent: int = 0
    bytes_received: int = 0
    staging_bytes: int = 0
    workspace_bytes: int = 0
    num_matrices: int = 0
    num_calls: int = 0
    local_ns: int = 0
    rounds: list[list[Round]] = field(default_factory=list)
    step_ns: int = 0

    @property
    def newton_schulz_ns(self) -> int:
        """Estimated Newton-Schulz time."""
        return self.local_ns + sum(each.newton_schulz for plan in self.rounds for each in plan)

    @property
    def traffic_ns(self) -> int:
        """Estimated time of its messages."""
        return sum(each.rows + each.results for plan in self.rounds for each in plan)

    def timeline(self) -> list[Span]:
        """Estimate its step."""
        return timeline(self.local_ns, self.rounds)


@dataclass
class Report:
    """Figures of a job.

    Args:
        ranks: Figures by rank.
        ideal_ns: Newton-Schulz time if all matrices, none split, were spread evenly.
        num_elements: Elements of all matrices.
        moved_elements: Elements sent to owners.
        lower_bound_bytes: Fewest bytes possible with one owner per matrix: the largest holder owns
            it, everything else is gathered and scattered.
        norm_bytes: Bytes of the all-reduce of norms, counted once.
        num_buckets: Buckets of the plan with most of them.
        num_split_groups: Sets of ranks that split matrices, one communicator per set.
        num_blocks: Blocks by backend.
        matrices: ``name`` and ``owner``, or ``owners`` if it is split, by matrix.
        busiest_ns: Newton-Schulz time of the busiest rank.
        busiest_over_ideal: Busiest Newton-Schulz time over the ideal.
        step_ns: Estimated step of the slowest rank.
        moved_fraction: Elements sent to owners over all elements.
        bytes_sent: Bytes that all ranks send.
        max_staging_bytes: Staging memory of the fullest rank.
        max_step_bytes: The same with the workspace of Newton-Schulz.
    """

    ranks: list[RankReport]
    ideal_ns: int = 0
    num_elements: int = 0
    moved_elements: int = 0
    lower_bound_bytes: int = 0
    norm_bytes: int = 0
    num_buckets: int = 0
    num_split_groups: int = 0
    num_blocks: Counter[str] = field(default_factory=Counter)
    matrices: list[dict[str, Any]] = field(default_factory=list)
    busiest_ns: int = 0
    busiest_over_ideal: float = 1.0
    step_ns: int = 0
    moved_fraction: float = 0.0
    bytes_sent: int = 0
    max_staging_bytes: int = 0
    max_step_bytes: int = 0


def build_report(ranks: Sequence[int], plans: Sequence[ExchangePlan]) -> Report:
    """Add up the plans of all domains of a job, or one plan, by rank."""
    # Ranks without a matrix count too: they wait for the others, and may still send rows.
    by_rank = {rank: RankReport(rank) for rank in ranks}
    report = Report(list(by_rank.values()))
    staging: dict[int, list[PlanStaging]] = defaultdict(list)
    for plan in plans:
        counter = SizeCounter(plan)
        _add_matrices(report, by_rank, plan)
        for rank, time_ns in _add_calls(by_rank, plan, plan.local).items():
            by_rank[rank].local_ns += time_ns
        rounds = [
            (*_add_traffic(report, by_rank, counter, bucket), _add_calls(by_rank, plan, bucket))
            for bucket in plan.buckets
        ]
        for rank in plan.ranks:
            by_rank[rank].rounds.append([Round(*(ns[rank] for ns in times)) for times in rounds])
        for rank, plan_staging in counter.staging().items():
            staging[rank].append(plan_staging)
    # Most ranks stage the same.
    num_bytes = {
        key: StagingLayout.build(key).num_bytes for key in set(map(tuple, staging.values()))
    }
    for rank, buffers in staging.items():
        by_rank[rank].staging_bytes = num_bytes[tuple(buffers)]
    report.ideal_ns //= len(by_rank)
    report.busiest_ns = max(rank.newton_schulz_ns for rank in report.ranks)
    report.busiest_over_ideal = report.busiest_ns / report.ideal_ns if report.ideal_ns else 1.0
    for each in report.ranks:
        each.step_ns = round(max((span.end for span in each.timeline()), default=0))
    report.step_ns = max(rank.step_ns for rank in report.ranks)
    report.moved_fraction = report.moved_elements / max(1, report.num_elements)
    report.bytes_sent = sum(rank.bytes_sent for rank in report.ranks)
    report.max_staging_bytes = max(rank.staging_bytes for rank in report.ranks)
    report.max_step_bytes = max(r.staging_bytes + r.workspace_bytes for r in report.ranks)
    return report


def _add_matrices(report: Report, by_rank: Mapping[int, RankReport], plan: ExchangePlan) -> None:
    """Add matrices to their owners, and sums over all matrices."""
    dtypes = plan.dtypes
    for index, (matrix, owners) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
        owner_entry = {"owner": owners[0]} if len(owners) == 1 else {"owners": list(owners)}
        report.matrices.append({"name": matrix.name, **owner_entry})
        report.num_blocks.update(plan.backend(index, block) for block in range(len(matrix.blocks)))
        report.num_elements += matrix.num_elements
        report.ideal_ns += sum(plan.cost.newton_schulz_ns(*shape) for shape in matrix.blocks)
        report.norm_bytes += dtypes.norm_bytes * len(matrix.blocks)
        # An owner keeps its own rows, so the largest holder saves most. Results go to every
        # replica, rows come from one of them.
        held = matrix.elements_by_rank.values()
        report.lower_bound_bytes += dtypes.gather_bytes * (matrix.num_elements - max(held))
        report.lower_bound_bytes += dtypes.scatter_bytes * (sum(held) - max(held))
        # A part counts as a matrix: it needs a call of Newton-Schulz like one.
        for owner in owners:
            by_rank[owner].num_matrices += 1
    report.num_buckets = max(report.num_buckets, len(plan.buckets))
    report.num_split_groups += len(plan.sets_of_owners)


def _add_traffic(
    report: Report, by_rank: Mapping[int, RankReport], counter: SizeCounter, bucket: Sequence[int]
) -> tuple[Counter[int], Counter[int]]:
    """Add rows and results of a bucket, and the all-gathers of replicas.

    Returns:
        Estimated times of rows and of results by rank, in the busier direction.
    """
    plan = counter.plan
    cost, dtypes = plan.cost, plan.dtypes
    times: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    rows, results_by_shard = counter.traffic(bucket)
    report.moved_elements += rows.sent.total()
    # The inverse of the gather without replicas.
    results = Traffic(rows.received, rows.sent)
    if plan.has_replicas:
        results = Traffic(Counter(), Counter())
    for holders, section_size, messages in counter.scatters(results_by_shard):
        for owner, holder, start, stop, _ in messages:
            if owner != holder:
                results.add(owner, holder, stop - start, cost.is_on_one_node((owner, holder)))
        section_bytes = dtypes.scatter_bytes * section_size
        passed_on = section_bytes * (len(holders) - 1)
        time_ns = all_gather_ns(cost, holders, section_bytes * len(holders))
        for holder in holders:
            rank = by_rank[holder]
            rank.bytes_sent += passed_on
            rank.bytes_received += passed_on
            times[1][holder] += time_ns
    widths = (dtypes.gather_bytes, dtypes.scatter_bytes)
    for times_ns, traffic, width in zip(times, (rows, results), widths, strict=True):
        for rank in map(by_rank.__getitem__, plan.ranks):
            sent, received = (
                [width * elements[rank.rank, on_node] for on_node in (True, False)]
                for elements in traffic
            )
            rank.bytes_sent += sum(sent)
            rank.bytes_received += sum(received)
            times_ns[rank.rank] += max(messages_ns(cost, *sent), messages_ns(cost, *received))
    return times


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


def stack_ns(
    cost: CostModel,
    num_matrices: int,
    shape: MatrixShape,
    num_parts: int = 1,
    *,
    on_node: bool = True,
) -> int:
    """Estimate one call of Newton-Schulz; other arguments as for ``newton_schulz_ns()``."""
    backend = cost.backend_of(*shape, num_parts)
    products, launches, all_reduces = cost.costs_ns(*shape, num_parts, backend, on_node=on_node)
    calls = 1 if BACKENDS[backend].is_batched else num_matrices
    return num_matrices * products + calls * launches + all_reduces


def _add_calls(
    by_rank: Mapping[int, RankReport], plan: ExchangePlan, indices: Sequence[int]
) -> Counter[int]:
    """Add the Newton-Schulz calls of some matrices, and return their times by rank.

    Stacks count as they are, full or not.
    """
    times_ns: Counter[int] = Counter()
    for rank, stacks in plan.stacks(indices).items():
        by_rank[rank].num_calls += len(stacks)
        for stack in stacks:
            part = stack[0]
            by_rank[rank].workspace_bytes = max(
                by_rank[rank].workspace_bytes, _workspace_bytes(plan, stack)
            )
            times_ns[rank] += stack_ns(
                plan.cost,
                len(stack),
                plan.matrices[part.matrix].blocks[part.block],
                len(part.owners),
                on_node=plan.cost.is_on_one_node(part.owners),
            )
    return times_ns


def _workspace_bytes(plan: ExchangePlan, stack: Sequence[Part]) -> int:
    """Return the memory of Newton-Schulz, as ``Backend.workspace_bytes`` in a run."""
    part = stack[0]
    backend = BACKENDS[plan.backend(part.matrix, part.block)]
    num_stacks, num_squares = backend.workspace
    side = min(plan.matrices[part.matrix].blocks[part.block])
    num_elements = num_stacks * sum(each.num_rows * each.num_cols for each in stack)
    num_elements += num_squares * len(stack) * side**2
    return num_elements * plan.dtypes.gather_bytes


def table(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    ranks = report.ranks
    split = f"{sum('owners' in matrix for matrix in report.matrices)} are split"
    if report.num_split_groups:
        split += f", over {report.num_split_groups} sets of ranks"
    yield (
        f"{len(report.matrices)} matrices, {report.num_elements / 1e6:,.1f} M elements, on "
        f"{len(ranks)} ranks, {sum(rank.num_calls > 0 for rank in ranks)} of them orthogonalize; "
        f"{split}"
    )
    yield (
        f"Newton-Schulz: busiest rank {report.busiest_ns / 1e6:.3f} ms, ideal "
        f"{report.ideal_ns / 1e6:.3f} ms, ratio {report.busiest_over_ideal:.3f}; at most "
        f"{max(rank.num_calls for rank in ranks)} calls a rank"
    )
    if set(report.num_blocks) != {"standard"}:
        blocks = ", ".join(f"{name} {num}" for name, num in sorted(report.num_blocks.items()))
        yield f"Newton-Schulz by backend, blocks: {blocks}"
    most = max(max(rank.bytes_sent, rank.bytes_received) for rank in ranks)
    yield (
        f"traffic: {report.moved_fraction:.1%} of elements move, "
        f"{report.bytes_sent / 1e6 / len(ranks):,.1f} MB a rank, {most / 1e6:,.1f} MB at most; "
        f"lower bound {report.lower_bound_bytes / 1e6 / len(ranks):,.1f} MB; norms "
        f"{report.norm_bytes:,} bytes"
    )
    yield f"step: {report.step_ns / 1e6:.3f} ms, in {report.num_buckets} buckets"
    yield "rank  matrices  Newton-Schulz ms  traffic ms  sent MB  received MB  staging MB"
    # Only the busiest of many ranks are listed: they decide the step.
    shown = sorted(ranks, key=lambda rank: (-rank.newton_schulz_ns, rank.rank))[:_MAX_RANKS_SHOWN]
    for rank in ranks if len(ranks) <= _MAX_RANKS_SHOWN else shown:
        yield (
            f"{rank.rank:4d}  {rank.num_matrices:8d}  {rank.newton_schulz_ns / 1e6:16.3f}  "
            f"{rank.traffic_ns / 1e6:10.3f}  {rank.bytes_sent / 1e6:7.1f}  "
            f"{rank.bytes_received / 1e6:11.1f}  {rank.staging_bytes / 1e6:10.1f}"
        )
    if len(ranks) > len(shown):
        yield f"... the {len(shown)} busiest of {len(ranks)} ranks"
