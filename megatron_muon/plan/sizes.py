# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Elements that all ranks send, receive and orthogonalize in one bucket.

Messages and stacks of one rank are built from routes, see ``megatron_muon.plan.rank_plan``. Here
the same routes are counted for thousands of ranks: for the memory that buckets need, and for
reports. Matrices of all layers share their shards: overlaps of shards and parts are computed
once.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, MatrixShape, Ranks
from megatron_muon.plan.routes import (
    Part,
    ShardScatter,
    nearest_holder,
    parts_of,
    routes_of,
    scatter_to,
)
from megatron_muon.plan.schedule import PlanOrder
from megatron_muon.plan.settings import CommDtypes
from megatron_muon.plan.staging import BucketSizes, PlanStaging

# Parts of one shape, orthogonalized by one call of Newton-Schulz.
type Stack = tuple[Part, ...]
# Holders of a shard, position of a part among the owners, elements of the shard in the part.
type Overlap = tuple[Ranks, int, int]
# Elements of results, by holders of a shard and by owner.
type Results = dict[Ranks, Counter[int]]


def num_elements(stack: Stack) -> int:
    """Count the elements that a stack takes: a multiple of 128.

    The next stack then begins at a multiple of 256 bytes, as every allocation of CUDA does. GPUs
    choose kernels by alignment: at other addresses products can have other bits, and take longer.
    """
    return -(-sum(part.num_rows * part.num_cols for part in stack) // 128) * 128


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
    """Count the elements of messages and stacks by bucket."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        owners: Sequence[Ranks],
        cost: CostModel,
        dtypes: CommDtypes,
    ) -> None:
        self.matrices, self.owners, self.cost, self.dtypes = matrices, owners, cost, dtypes
        # Equal layers share their regions.
        regions = {id(matrix.regions): matrix.regions for matrix in matrices}.values()
        self.has_replicas = any(len(region.holders) > 1 for tiling in regions for region in tiling)
        self._overlaps: dict[tuple[int, int], list[Overlap]] = {}

    def stacks(self, indices: Iterable[int]) -> dict[int, list[Stack]]:
        """Return the stacks of some matrices by owner, in the order of the step."""
        stacks: dict[int, list[Stack]] = defaultdict(list)
        by_shape: dict[tuple[int, MatrixShape], list[Part]] = defaultdict(list)
        for index in indices:
            owners = self.owners[index]
            for block, shape in enumerate(self.matrices[index].blocks):
                for part in parts_of(index, block, shape, owners):
                    # Upstream's function orthogonalizes rows in fp32, one matrix a call. The
                    # all-reduces of a split block are between its owners: batching it with
                    # another block would need the same owners, in the same stack, on all.
                    if self.dtypes.normalizes and len(owners) == 1:
                        by_shape[part.owner, shape].append(part)
                    else:
                        stacks[part.owner].append((part,))
        for (owner, shape), parts in by_shape.items():
            stacks[owner] += itertools.batched(parts, self.cost.stack_size(*shape))
        for owned in stacks.values():
            # Ranks that share several split blocks must come to them in the same order, and first:
            # they all-reduce inside Newton-Schulz.
            owned.sort(key=lambda stack: (len(stack[0].owners) == 1, stack[0][:2]))
        return stacks

    def traffic(self, indices: Iterable[int]) -> tuple[Traffic, Results]:
        """Return the traffic of rows in a bucket, and the results by shard.

        Results include an owner's own shard, for its replicas. Without replicas there are none: the
        scatter is then the inverse of the gather.
        """
        if not self.has_replicas:
            return self._traffic_without_replicas(indices), {}
        rows = Traffic(Counter(), Counter())
        results: Results = defaultdict(Counter)
        for index in indices:
            for holders, part, elements in self._overlaps_of(index):
                owner = self.owners[index][part]
                source = nearest_holder(holders, owner, self.cost)
                if source != owner:
                    rows.add(source, owner, elements, self.cost.share_a_node((source, owner)))
                if len(holders) > 1 or source != owner:
                    results[holders][owner] += elements
        return rows, results

    def scatters(self, results: Results) -> Iterator[ShardScatter]:
        """Yield the scatters of a bucket, by shard."""
        for holders, by_owner in results.items():
            yield scatter_to(holders, by_owner, self.cost)

    def sizes(self, indices: Sequence[int]) -> dict[int, BucketSizes]:
        """Return the buffers of every rank for a bucket of some matrices."""
        stacks = self.stacks(indices)
        rows, results = self.traffic(indices)
        sends: Counter[int] = Counter()
        receives: Counter[int] = Counter()
        for shard in self.scatters(results):
            for share in shard.shares:
                sends[share.owner] += share.num_elements
            for holder in shard.holders:
                receives[holder] += shard.num_elements
        sizes = {}
        for rank in {*stacks, *sends, *receives, *(rank for counts in rows for rank, _ in counts)}:
            sent, received = (counts[rank, True] + counts[rank, False] for counts in rows)
            stacked = sum(map(num_elements, stacks.get(rank, ())))
            results_sent, results_received = received, sent
            if self.has_replicas:
                results_sent, results_received = sends[rank], receives[rank]
            sizes[rank] = BucketSizes(sent, received, stacked, results_sent, results_received)
        return sizes

    def staging(
        self, buckets: Sequence[Sequence[int]], local: Iterable[int], order: PlanOrder
    ) -> dict[int, PlanStaging]:
        """Return the staging memory by rank, from the indices of exchanged and local matrices.

        Ranks without any may be left out.
        """
        by_bucket = [self.sizes(bucket) for bucket in buckets]
        largest = {
            owner: max(map(num_elements, stacks)) for owner, stacks in self.stacks(local).items()
        }
        nothing = BucketSizes(0, 0, 0, 0, 0)
        return {
            rank: PlanStaging(
                order,
                tuple(sizes.get(rank, nothing) for sizes in by_bucket),
                largest.get(rank, 0),
                self.dtypes,
            )
            for rank in set(largest).union(*by_bucket)
        }

    def _traffic_without_replicas(self, indices: Iterable[int]) -> Traffic:
        """Return the traffic of rows in a bucket.

        All shards of a matrix go to its owners. Matrices with equal layouts are counted together:
        ranks times matrices are many millions.
        """
        sent, received = rows = Traffic(Counter(), Counter())
        node = self.cost.node
        groups: dict[int, list[int]] = defaultdict(list)
        for index in indices:
            groups[id(self._overlaps_of(index))].append(index)
        for group in groups.values():
            elements = {
                (source, part): number for (source,), part, number in self._overlaps_of(group[0])
            }
            num_owners = Counter(
                (part, node(owner))
                for index in group
                for part, owner in enumerate(self.owners[index])
            )
            total: Counter[int] = Counter()
            on_node: Counter[tuple[int, int]] = Counter()
            for (source, part), number in elements.items():
                near = num_owners[part, node(source)]
                sent[source, True] += number * near
                sent[source, False] += number * (len(group) - near)
                total[part] += number
                on_node[part, node(source)] += number
            for index in group:
                for part, owner in enumerate(self.owners[index]):
                    # The owner's rows stay.
                    kept, near = elements.get((owner, part), 0), on_node[part, node(owner)]
                    sent[owner, True] -= kept
                    received[owner, True] += near - kept
                    received[owner, False] += total[part] - near
        return rows

    def _overlaps_of(self, index: int) -> list[Overlap]:
        matrix, num_parts = self.matrices[index], len(self.owners[index])
        key = id(matrix.elements_by_rank), num_parts
        if key not in self._overlaps:
            elements: Counter[tuple[Ranks, int]] = Counter()
            # Parts by position, as if the first ranks owned the matrix.
            for route in routes_of(index, matrix, tuple(range(num_parts)), self.cost):
                elements[route.holders, route.owner] += route.num_elements
            self._overlaps[key] = [(*cell, count) for cell, count in elements.items()]
        return self._overlaps[key]
