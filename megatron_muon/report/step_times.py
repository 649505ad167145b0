# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Estimated times of the buckets of a plan, in nanoseconds by rank."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.schedule import PlanOrder
from megatron_muon.plan.sizes import BucketTraffic, OnOffNode, StackSize


@dataclass(frozen=True)
class BucketTimes:
    """Times of a bucket; a rank that is missing has none.

    Args:
        load_ns: Newton-Schulz.
        gather_ns: Rows, over the link of a rank that sends or receives them.
        scatter_ns: Results, over such a link, in all scatters of the bucket.
        all_gather_ns: What replicas pass on, over the link of each of them.
        sources_ns: By owner, the time of the slowest rank that sends rows to it.
    """

    load_ns: Mapping[int, int]
    gather_ns: Mapping[int, int]
    scatter_ns: Mapping[int, int]
    all_gather_ns: Mapping[int, int] = field(default_factory=dict)
    sources_ns: Mapping[int, int] = field(default_factory=dict)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the times of a rank."""
        times = (
            *(self.load_ns, self.gather_ns, self.scatter_ns),
            *(self.all_gather_ns, self.sources_ns),
        )
        return tuple(by_rank.get(rank, 0) for by_rank in times)


@dataclass(frozen=True)
class PlanTimes:
    """Times of a plan.

    Args:
        ranks: Ranks that join its collectives.
        buckets: Its buckets.
        order: What of it decides the order of a step.
        latency_ns: A collective that carries nothing.
    """

    ranks: Sequence[int]
    buckets: Sequence[BucketTimes]
    order: PlanOrder
    latency_ns: int = 0


class Traffic(NamedTuple):
    """Bytes of one collective of all buckets, or of one bucket, by rank.

    Args:
        sent: Bytes that each rank sends.
        received: Bytes that it receives.
    """

    sent: Mapping[int, OnOffNode]
    received: Mapping[int, OnOffNode]


@dataclass(frozen=True)
class BucketReport:
    """Traffic, calls and times of one bucket.

    Args:
        gather: Rows.
        scatter: Results, from owners to holders.
        passed_on: Bytes that each replica sends to others, and receives.
        stacks: Stacks by owner.
        num_copies: Rectangles that each rank copies.
        times: Estimated times.
    """

    gather: Traffic
    scatter: Traffic
    passed_on: Mapping[int, int]
    stacks: Mapping[int, Sequence[StackSize]]
    num_copies: Mapping[int, int]
    times: BucketTimes

    @classmethod
    def of(cls, plan: ExchangePlan, bucket: Sequence[int], on_node_gbps: float) -> "BucketReport":
        """Count one bucket of a plan.

        Args:
            plan: The plan.
            bucket: Indices of its matrices.
            on_node_gbps: Bandwidth of a rank to its node in the exchange of the plan.
        """
        cost, wire = plan.cost, plan.wire
        traffic = plan.sizes.traffic(bucket, counts_copies=True)
        sent, received = traffic.gather(cost)
        gather = Traffic(_scaled(sent, wire.gather_bytes), _scaled(received, wire.gather_bytes))
        passed_on: dict[int, int] = {}
        all_gather_ns: dict[int, int] = {}
        if plan.order.has_replicas:
            scatter = _scatter(plan, traffic, passed_on, all_gather_ns)
        else:
            # The inverse of the gather.
            scatter = Traffic(
                _scaled(received, wire.scatter_bytes), _scaled(sent, wire.scatter_bytes)
            )
        stacks = plan.stacking.stacks(bucket)
        gather_ns, sent_ns = _link_ns(plan, gather, on_node_gbps)
        scatter_ns, _ = _link_ns(plan, scatter, on_node_gbps)
        return cls(
            gather,
            scatter,
            passed_on,
            stacks,
            traffic.num_copies(),
            BucketTimes(
                {owner: stacks_ns(plan, sizes) for owner, sizes in stacks.items()},
                gather_ns,
                scatter_ns,
                all_gather_ns,
                _sources_ns(traffic, sent_ns),
            ),
        )


def stacks_ns(plan: ExchangePlan, stacks: Sequence[StackSize]) -> int:
    """Estimate the Newton-Schulz calls of some stacks: those that exist, not full ones."""
    return sum(
        plan.cost.stack_ns(stack.num_matrices, *stack.block, stack.num_parts, on_node=stack.on_node)
        for stack in stacks
    )


def _scaled(elements: Mapping[int, OnOffNode], width: int) -> dict[int, OnOffNode]:
    return {
        rank: OnOffNode(width * count.on_node, width * count.off_node)
        for rank, count in elements.items()
    }


def _scatter(
    plan: ExchangePlan,
    traffic: BucketTraffic,
    passed_on: dict[int, int],
    all_gather_ns: dict[int, int],
) -> Traffic:
    """Return what owners send to replicas; note what these pass on, and how long that takes."""
    cost, width = plan.cost, plan.wire.scatter_bytes
    sent: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    received: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for _, shard in traffic.scatters(plan.num_scatters, cost):
        for share in shard.shares:
            if share.owner != share.holder:
                off_node = int(cost.node(share.owner) != cost.node(share.holder))
                sent[share.owner][off_node] += width * share.num_elements
                received[share.holder][off_node] += width * share.num_elements
        if shard.num_passed_on:
            time_ns = cost.all_gather_ns(shard.holders, width * shard.num_elements)
            for holder in shard.holders:
                passed_on[holder] = passed_on.get(holder, 0) + width * shard.num_passed_on
                all_gather_ns[holder] = all_gather_ns.get(holder, 0) + time_ns
    return Traffic(
        {rank: OnOffNode(*count) for rank, count in sent.items()},
        {rank: OnOffNode(*count) for rank, count in received.items()},
    )


def _link_ns(
    plan: ExchangePlan, traffic: Traffic, on_node_gbps: float
) -> tuple[dict[int, int], dict[int, int]]:
    """Return how long the link of each rank is busy, and how long it sends."""
    sent_ns, received_ns = (
        {rank: plan.cost.messages_ns(*count, on_node_gbps) for rank, count in counts.items()}
        for counts in traffic
    )
    # A link carries both directions at once: the longer one counts.
    busy_ns = {
        rank: max(sent_ns.get(rank, 0), received_ns.get(rank, 0))
        for rank in {**sent_ns, **received_ns}
    }
    return busy_ns, sent_ns


def _sources_ns(traffic: BucketTraffic, sent_ns: Mapping[int, int]) -> dict[int, int]:
    slowest: Counter[int] = Counter()
    for held, _, owners in traffic.flows:
        longest_ns = max((sent_ns.get(rank, 0) for rank in held), default=0)
        for owner in owners:
            slowest[owner] = max(slowest[owner], longest_ns)
    for source, owner in traffic.pairs:
        slowest[owner] = max(slowest[owner], sent_ns.get(source, 0))
    return dict(slowest)
