# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Elements that all ranks send, receive and orthogonalize in one bucket.

Messages and stacks of one rank are built from routes, see ``megatron_muon.plan.rank_plan``. Here
the same routes are counted for thousands of ranks. Matrices of all layers share their shards:
overlaps of shards and parts are computed once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import Ranks
from megatron_muon.plan.routes import (
    routes_of,
    section_size,
    source_of,
    stack_elements,
)
from megatron_muon.plan.settings import DTYPE_BYTES
from megatron_muon.plan.staging import BucketSizes, PlanStaging, StagingLayout

# Holders of a shard, position of a part among the owners, elements of the shard in the part.
type Overlap = tuple[Ranks, int, int]
# Elements of results, by holders of a shard and by owner.
type Results = dict[Ranks, Counter[int]]


class Traffic(NamedTuple):
    """Elements of messages between ranks.

    Args:
        sent: Elements by sender, and whether the receiver is on its node.
        received: Elements by receiver, and whether the sender is on its node.
    """

    sent: Counter[tuple[int, bool]]
    received: Counter[tuple[int, bool]]

    def add(self, sender: int, receiver: int, elements: int, on_node: bool) -> None:
        """Add a message."""
        self.sent[sender, on_node] += elements
        self.received[receiver, on_node] += elements


class SizeCounter:
    """Count the elements of messages and stacks of a plan by bucket."""

    def __init__(self, plan: ExchangePlan) -> None:
        self.plan = plan
        self._overlaps: dict[tuple[int, int], list[Overlap]] = {}

    def traffic(self, indices: Iterable[int]) -> tuple[Traffic, Results]:
        """Return the traffic of rows in a bucket, and the results by shard.

        Rows are those of all inputs. Results include an owner's own shard, if it has replicas.
        """
        plan, num_inputs = self.plan, self.plan.dtypes.num_inputs
        rows = Traffic(Counter(), Counter())
        results: Results = defaultdict(Counter)
        for index in indices:
            for holders, part, elements in self._overlaps_of(index):
                owner = plan.owners[index][part]
                source = source_of(holders, owner)
                if source != owner:
                    on_node = plan.cost.is_on_one_node((source, owner))
                    rows.add(source, owner, num_inputs * elements, on_node)
                if len(holders) > 1 or source != owner:
                    results[holders][owner] += elements
        return rows, results

    def sizes(self, indices: Sequence[int]) -> dict[int, BucketSizes]:
        """Return the elements of the buffers of every rank for a bucket of some matrices."""
        stacks = self.plan.stacks(indices)
        rows, results = self.traffic(indices)
        sends: Counter[int] = Counter()
        receives: Counter[int] = Counter()
        for holders, by_owner in results.items():
            sends.update(by_owner)
            for holder in holders:
                receives[holder] += len(holders) * section_size(len(holders), by_owner.total())
        sizes = {}
        for rank in {*stacks, *sends, *receives, *(rank for counts in rows for rank, _ in counts)}:
            sent, received = (counts[rank, True] + counts[rank, False] for counts in rows)
            stacked = self.plan.dtypes.num_inputs * sum(map(stack_elements, stacks.get(rank, ())))
            sizes[rank] = BucketSizes(sent, received, stacked, sends[rank], receives[rank])
        return sizes

    def staging(self) -> dict[int, PlanStaging]:
        """Return the staging memory by rank; ranks without any may be left out."""
        plan = self.plan
        by_bucket = [self.sizes(bucket) for bucket in plan.buckets]
        local = plan.stacks(plan.local)
        nothing = BucketSizes(0, 0, 0, 0, 0)
        width = plan.dtypes.num_inputs * DTYPE_BYTES[plan.dtypes.stack_dtype]
        return {
            rank: PlanStaging(
                tuple(sizes.get(rank, nothing).in_bytes(plan.dtypes) for sizes in by_bucket),
                max(map(stack_elements, local.get(rank, ())), default=0) * width,
            )
            for rank in set(local).union(*by_bucket)
        }

    def _overlaps_of(self, index: int) -> list[Overlap]:
        plan = self.plan
        matrix, num_parts = plan.matrices[index], len(plan.owners[index])
        key = id(matrix.elements_by_rank), num_parts
        if key not in self._overlaps:
            elements: Counter[tuple[Ranks, int]] = Counter()
            # Parts by position, as if the first ranks owned the matrix.
            for route in routes_of(index, matrix, tuple(range(num_parts))):
                elements[route.holders, route.owner] += route.num_elements
            self._overlaps[key] = [(*cell, count) for cell, count in elements.items()]
        return self._overlaps[key]


def messages_to(holders: Ranks, by_owner: Counter[int]) -> Iterator[tuple[int, int, int]]:
    """Yield owner, holder and elements of the messages of results for one shard, in order."""
    size, offset = section_size(len(holders), by_owner.total()), 0
    for owner in sorted(by_owner):
        end = offset + by_owner[owner]
        while offset < end:
            stop = min(end, offset - offset % size + size)
            yield owner, holders[offset // size], stop - offset
            offset = stop


def fullest_bytes(plan: ExchangePlan) -> int:
    """Return the staging bytes of the fullest rank, as its engine allocates them."""
    # Most ranks stage the same.
    stagings = set(SizeCounter(plan).staging().values())
    return max((StagingLayout.build([staging]).num_bytes for staging in stagings), default=0)
