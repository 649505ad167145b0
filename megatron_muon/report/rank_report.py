# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What plans mean for each rank, in numbers: times, bytes, memory, calls."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.sizes import BucketTraffic, OnOffNode, RankSizes, StackSize
from megatron_muon.plan.staging import PlanStaging, StagingLayout


@dataclass
class RankReport:
    """One rank's share.

    Args:
        rank: Rank of the job.
        load_ns: Estimated Newton-Schulz time.
        passes_ns: Estimated element-wise passes over what it holds.
        host_ns: Estimated host time of the exchange and of Newton-Schulz.
        elements_sent: Elements sent to owners, and results sent back.
        bytes_sent: Their bytes.
        bytes_received: Bytes received from others.
        send_ns: Estimated time of what it sends.
        receive_ns: Estimated time of what it receives.
        num_matrices: Matrices it owns, or has a part of.
        num_calls: Calls of Newton-Schulz: each orthogonalizes one stack.
        staging_bytes: Memory of messages and stacks while a step runs; nothing stays between steps.
        num_split_groups: Sets of ranks that it splits matrices with: each is a communicator.
    """

    rank: int
    load_ns: int = 0
    passes_ns: int = 0
    host_ns: int = 0
    elements_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    send_ns: int = 0
    receive_ns: int = 0
    num_matrices: int = 0
    num_calls: int = 0
    staging_bytes: int = 0
    num_split_groups: int = 0

    @property
    def traffic_ns(self) -> int:
        """Estimated time of the busier direction of its links."""
        return max(self.send_ns, self.receive_ns)


@dataclass(frozen=True)
class Report:
    """A job's plans in numbers.

    Args:
        ranks: Share of each rank.
        ideal_ns: Newton-Schulz time if all matrices, none split, were spread evenly.
        num_elements: Elements of all matrices.
        moved_elements: Elements sent to owners.
        lower_bound_bytes: Fewest bytes possible with one owner per matrix: the largest holder owns
            it, everything else is gathered and scattered.
        norm_bytes: Bytes of the all-reduce of norms, counted once.
        num_buckets: Buckets of the plan with most of them.
        num_split_groups: Sets of ranks that split matrices.
        num_blocks: Blocks that each backend orthogonalizes.
        matrices: ``index``, ``name`` and ``owner`` (``owners`` where it is split), in order.
    """

    ranks: list[RankReport]
    ideal_ns: int
    num_elements: int
    moved_elements: int
    lower_bound_bytes: int
    norm_bytes: int
    num_buckets: int
    num_split_groups: int
    num_blocks: dict[str, int]
    matrices: list[dict[str, Any]]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def busiest_ns(self) -> int:
        """Newton-Schulz time of the busiest rank."""
        return max(rank.load_ns for rank in self.ranks)

    @property
    def busiest_over_ideal(self) -> float:
        """Busiest Newton-Schulz time over the ideal."""
        return self.busiest_ns / self.ideal_ns if self.ideal_ns else 1.0

    @property
    def min_step_ns(self) -> int:
        """Time of the busiest GPU or link: no step is shorter."""
        return max(max(rank.load_ns + rank.passes_ns, rank.traffic_ns) for rank in self.ranks)

    @property
    def host_ns(self) -> int:
        """Estimated host time of exchange and Newton-Schulz on the busiest host."""
        return max(rank.host_ns for rank in self.ranks)

    @property
    def most_over_mean(self) -> float:
        """Most bytes that a rank sends or receives, over the mean."""
        most = max(max(rank.bytes_sent, rank.bytes_received) for rank in self.ranks)
        mean = sum(rank.bytes_sent for rank in self.ranks) / self.world_size
        return most / mean if mean else 1.0

    @property
    def max_split_groups(self) -> int:
        """Most sets of ranks that one rank splits matrices with."""
        return max(rank.num_split_groups for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        # Keys are an interface: scripts read them. Attributes may be renamed, keys may not.
        sent = [rank.elements_sent for rank in self.ranks]
        return {
            "world_size": self.world_size,
            "busiest_over_ideal": self.busiest_over_ideal,
            "mean_elements_sent": sum(sent) / self.world_size,
            "max_elements_sent": max(sent),
            "moved_fraction": self.moved_elements / max(1, self.num_elements),
            "bytes": sum(rank.bytes_sent for rank in self.ranks),
            "lower_bound_bytes": self.lower_bound_bytes,
            "norm_bytes": self.norm_bytes,
            "num_buckets": self.num_buckets,
            "num_split_groups": self.num_split_groups,
            "max_split_groups_of_a_rank": self.max_split_groups,
            "blocks_by_backend": self.num_blocks,
            "newton_schulz_ms": self.busiest_ns / 1e6,
            "ideal_newton_schulz_ms": self.ideal_ns / 1e6,
            "min_step_ms": self.min_step_ns / 1e6,
            "host_ms": self.host_ns / 1e6,
            "max_staging_bytes": max(rank.staging_bytes for rank in self.ranks),
            "ranks": [
                {
                    "rank": rank.rank,
                    "newton_schulz_ms": rank.load_ns / 1e6,
                    "element_wise_ms": rank.passes_ns / 1e6,
                    "host_ms": rank.host_ns / 1e6,
                    "traffic_ms": rank.traffic_ns / 1e6,
                    "elements_sent": rank.elements_sent,
                    "bytes_sent": rank.bytes_sent,
                    "bytes_received": rank.bytes_received,
                    "staging_bytes": rank.staging_bytes,
                    "num_matrices": rank.num_matrices,
                    "num_calls": rank.num_calls,
                }
                for rank in self.ranks
            ],
            "matrices": self.matrices,
        }


def build_report(ranks: Sequence[int], plans: Sequence[ExchangePlan]) -> Report:
    """Add up what plans mean for each rank.

    Args:
        ranks: Ranks of the job, or those of one plan.
        plans: Plans of its domains.
    """
    builder = _Builder(ranks, plans)
    for plan in plans:
        builder.add_matrices(plan)
        builder.add_plan(plan)
    return builder.build()


class _Builder:
    """Totals so far, and the share of each rank; see :func:`build_report`."""

    def __init__(self, ranks: Sequence[int], plans: Sequence[ExchangePlan]) -> None:
        # Ranks without a matrix are there too: they wait for the others, and may still send rows.
        self._ranks = {rank: RankReport(rank) for rank in ranks}
        self._plans = plans
        self._totals: Counter[str] = Counter()
        self._num_blocks: Counter[str] = Counter()
        self._matrices: list[dict[str, Any]] = []
        self._staging: dict[int, list[PlanStaging]] = defaultdict(list)

    def add_matrices(self, plan: ExchangePlan) -> None:
        """Add who owns what, and what it would be at best."""
        wire = plan.wire
        held_by_all: dict[int, int] = {}
        for index, (matrix, owners) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
            who = {"owner": owners[0]} if len(owners) == 1 else {"owners": list(owners)}
            self._matrices.append({"index": len(self._matrices), "name": matrix.name, **who})
            self._num_blocks.update(
                plan.backend(index, block) for block in range(len(matrix.blocks))
            )
            self._totals["elements"] += matrix.num_elements
            self._totals["ns"] += sum(plan.cost.newton_schulz_ns(*s) for s in matrix.blocks)
            self._totals["norms"] += wire.norm_bytes * len(matrix.blocks)
            # An owner keeps what it holds itself, so the largest holder saves most. Results go to
            # every replica, rows come from one of them.
            held = matrix.elements_by_rank
            largest, with_replicas = max(held.values()), sum(held.values())
            self._totals["lower_bound"] += wire.gather_bytes * (matrix.num_elements - largest)
            self._totals["lower_bound"] += wire.scatter_bytes * (with_replicas - largest)
            for rank, elements in held.items():
                held_by_all[rank] = held_by_all.get(rank, 0) + elements
            # A part counts as a matrix: it needs a call of Newton-Schulz like one.
            for owner in owners:
                self._ranks[owner].num_matrices += 1
        for rank, elements in held_by_all.items():
            self._ranks[rank].passes_ns += plan.cost.pass_ns(elements)
        self._totals["split_groups"] += len(plan.sets_of_owners)
        for rank in (rank for owners in plan.sets_of_owners for rank in owners):
            self._ranks[rank].num_split_groups += 1

    def add_plan(self, plan: ExchangePlan) -> None:
        """Add traffic, calls, memory and times."""
        wire = plan.wire
        local = plan.stacking.stacks(plan.local)
        for rank, stacks in local.items():
            self._add_calls(plan, rank, stacks)
            copies = 2 * sum(stack.num_matrices for stack in stacks)
            self._ranks[rank].host_ns += plan.cost.host_ns(copies, 0)
        num_collectives = 1 + plan.num_scatters * (1 + plan.order.has_replicas)
        for bucket in plan.buckets:
            traffic = plan.sizes.traffic(bucket, counts_pieces=True)
            sent, received = traffic.gather(plan.cost)
            self._totals["moved"] += sum(count.total for count in sent.values())
            self._add_traffic(plan, sent, received, wire.gather_bytes)
            if plan.order.has_replicas:
                self._add_scatters(plan, traffic)
            else:
                # The inverse of the gather.
                self._add_traffic(plan, received, sent, wire.scatter_bytes)
            for rank, stacks in plan.stacking.stacks(bucket).items():
                self._add_calls(plan, rank, stacks)
            num_copies = traffic.num_pieces()
            for rank in plan.ranks:
                self._ranks[rank].host_ns += plan.cost.host_ns(
                    num_copies.get(rank, 0), num_collectives
                )
        self._add_staging(plan, local)

    def _add_traffic(
        self,
        plan: ExchangePlan,
        sent: Mapping[int, OnOffNode],
        received: Mapping[int, OnOffNode],
        width: int,
    ) -> None:
        """Add a collective by the elements that each rank sends and receives."""
        cost = plan.cost
        gbps = cost.on_node_gbps(plan.ranks)
        for rank, (on_node, off_node) in sent.items():
            share = self._ranks[rank]
            share.elements_sent += on_node + off_node
            share.bytes_sent += width * (on_node + off_node)
            share.send_ns += cost.messages_ns(width * on_node, width * off_node, gbps)
        for rank, (on_node, off_node) in received.items():
            share = self._ranks[rank]
            share.bytes_received += width * (on_node + off_node)
            share.receive_ns += cost.messages_ns(width * on_node, width * off_node, gbps)

    def _add_scatters(self, plan: ExchangePlan, traffic: BucketTraffic) -> None:
        """Add what owners send to replicas, and what these pass on to each other."""
        cost, width = plan.cost, plan.wire.scatter_bytes
        sent: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        received: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for _, shard in traffic.scatters(plan.num_scatters, cost):
            for part in shard.shares:
                if part.owner != part.holder:
                    off_node = int(cost.node(part.owner) != cost.node(part.holder))
                    sent[part.owner][off_node] += part.num_elements
                    received[part.holder][off_node] += part.num_elements
            if shard.num_passed_on:
                time_ns = cost.all_gather_ns(shard.holders, width * shard.num_elements)
                for holder in shard.holders:
                    share = self._ranks[holder]
                    share.elements_sent += shard.num_passed_on
                    share.bytes_sent += width * shard.num_passed_on
                    share.bytes_received += width * shard.num_passed_on
                    share.send_ns += time_ns
                    share.receive_ns += time_ns
        self._add_traffic(
            plan,
            {rank: OnOffNode(*count) for rank, count in sent.items()},
            {rank: OnOffNode(*count) for rank, count in received.items()},
            width,
        )

    def _add_calls(self, plan: ExchangePlan, rank: int, stacks: Sequence[StackSize]) -> None:
        """Add the Newton-Schulz calls of some stacks: those that exist, not full ones."""
        share = self._ranks[rank]
        share.num_calls += len(stacks)
        for stack in stacks:
            size = stack.num_matrices, *stack.block, stack.num_parts
            share.load_ns += plan.cost.stack_ns(*size, on_node=stack.on_node)
            share.host_ns += plan.cost.launches_ns(*size)

    def _add_staging(self, plan: ExchangePlan, local: dict[int, list[StackSize]]) -> None:
        nothing = RankSizes.nothing(plan.num_scatters)
        of_buckets = [plan.sizes.sizes(bucket, plan.num_scatters) for bucket in plan.buckets]
        for rank in {*local, *(rank for sizes in of_buckets for rank in sizes)}:
            sizes = [of_bucket.get(rank, nothing) for of_bucket in of_buckets]
            largest = max((stack.num_elements for stack in local.get(rank, ())), default=0)
            self._staging[rank].append(
                PlanStaging(
                    plan.order,
                    [size.bucket.in_bytes(plan.wire) for size in sizes],
                    [each.in_bytes(plan.wire) for size in sizes for each in size.scatters],
                    largest * plan.wire.gather_bytes,
                )
            )

    def build(self) -> Report:
        """Return the report of what was added."""
        for rank, staging in self._staging.items():
            self._ranks[rank].staging_bytes = StagingLayout.build(staging).num_bytes
        return Report(
            list(self._ranks.values()),
            self._totals["ns"] // len(self._ranks),
            self._totals["elements"],
            self._totals["moved"],
            self._totals["lower_bound"],
            self._totals["norms"],
            max(len(plan.buckets) for plan in self._plans),
            self._totals["split_groups"],
            dict(self._num_blocks),
            self._matrices,
        )
