# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Elements that all ranks send, receive and orthogonalize in one bucket.

Messages and stacks of one rank are built from routes, see :mod:`megatron_muon.plan.rank_plan`. Here
the same routes are counted for thousands of ranks: for the memory that buckets need, and for
reports. Matrices of all layers share their shards, whose overlaps with the parts of a matrix are
computed once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.replicas import ShardScatter, scatters_of
from megatron_muon.plan.routes import nearest_holder, overlaps, parts_of
from megatron_muon.plan.settings import CommDtypes
from megatron_muon.plan.staging import BucketSizes, ScatterSizes


class StackSize(NamedTuple):
    """Parts of one shape that one call orthogonalizes.

    Args:
        num_matrices: Parts.
        num_rows: Rows of a part.
        num_cols: Columns of a part.
        block: Shape of the block that they are parts of.
        num_parts: Owners of each block.
        on_node: Whether these owners share a node.
    """

    num_matrices: int
    num_rows: int
    num_cols: int
    block: tuple[int, int]
    num_parts: int
    on_node: bool

    @property
    def num_elements(self) -> int:
        """Elements of all parts."""
        return self.num_matrices * self.num_rows * self.num_cols


@dataclass(frozen=True)
class Stacking:
    """Group parts of matrices that share a stack.

    Args:
        matrices: Layouts.
        owners: Owners of each.
        cost: Sizes of stacks.
        dtypes: Decides whether rows are normalized before they are sent.
    """

    matrices: Sequence[MatrixLayout]
    owners: Sequence[tuple[int, ...]]
    cost: CostModel
    dtypes: CommDtypes

    def is_stackable(self, index: int) -> bool:
        """Return whether blocks of a matrix may be orthogonalized in one call with others."""
        return (
            # Rows in fp32 are orthogonalized by upstream's function, which accepts one matrix.
            self.dtypes.normalizes
            # The all-reduces of a split block are between its owners: batching it with another
            # block would need the same owners, in the same stack, on all of them.
            and len(self.owners[index]) == 1
        )

    def stack_sizes(self, num_parts: int, shape: tuple[int, int]) -> list[int]:
        """Return the sizes of the stacks of some stackable parts of a shape."""
        largest = self.cost.stack_size(*shape)
        full, rest = divmod(num_parts, largest)
        return [largest] * full + ([rest] if rest else [])

    def stacks(self, indices: Iterable[int]) -> dict[int, list[StackSize]]:
        """Return the stacks of some matrices by owner."""
        counts: dict[tuple[int, StackSize, bool], int] = Counter()
        for index in indices:
            owners, matrix = self.owners[index], self.matrices[index]
            is_stackable = self.is_stackable(index)
            on_node = len(owners) == 1 or self.cost.share_a_node(owners)
            for block, shape in enumerate(matrix.blocks):
                for part in parts_of(index, block, shape, owners):
                    size = StackSize(1, part.num_rows, part.num_cols, shape, len(owners), on_node)
                    counts[part.owner, size, is_stackable] += 1
        stacks: dict[int, list[StackSize]] = defaultdict(list)
        for (owner, size, is_stackable), count in counts.items():
            numbers = self.stack_sizes(count, size.block) if is_stackable else [1] * count
            stacks[owner] += (size._replace(num_matrices=number) for number in numbers)
        return stacks


class _Overlap(NamedTuple):
    """Elements of a shard in one part of a matrix.

    Args:
        holders: Ranks that hold the shard.
        part: Position of the part among the owners.
        num_elements: Elements.
    """

    holders: tuple[int, ...]
    part: int
    num_elements: int


class Traffic(NamedTuple):
    """Elements that one bucket exchanges.

    Args:
        gathered: Rows by source and owner.
        results: With replicas, results by holders and owner, those of an owner's own shard
            included: its replicas get them from it. Empty without replicas, where the scatter is
            the inverse of the gather.
    """

    gathered: Counter[tuple[int, int]]
    results: dict[tuple[int, ...], Counter[int]]

    def totals(self) -> tuple[Counter[int], Counter[int]]:
        """Return the rows that each rank sends, and those that it receives."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for (source, owner), elements in self.gathered.items():
            sent[source] += elements
            received[owner] += elements
        return sent, received

    def scatters(self, num_scatters: int, cost: CostModel) -> Iterator[tuple[int, ShardScatter]]:
        """Yield the scatters to the replicas of each shard, with the number of the scatter."""
        for holders, by_owner in self.results.items():
            yield from enumerate(scatters_of(holders, by_owner, num_scatters, cost))


class RankSizes(NamedTuple):
    """Buffers of one rank for one bucket, in elements.

    Args:
        bucket: Its gather and its stacks.
        scatters: Its scatters.
    """

    bucket: BucketSizes
    scatters: tuple[ScatterSizes, ...]

    @classmethod
    def nothing(cls, num_scatters: int) -> "RankSizes":
        """Return the sizes of a rank that has no part in a bucket."""
        return cls(BucketSizes(0, 0, 0), (ScatterSizes(0, 0),) * num_scatters)


class SizeCounter:
    """Count the elements that buckets of some matrices send, receive and stage.

    Args:
        stacking: Matrices and owners.
        has_replicas: Whether any matrix has shards with several holders.
    """

    def __init__(self, stacking: Stacking, *, has_replicas: bool) -> None:
        self._stacking = stacking
        self._has_replicas = has_replicas
        self._overlaps: dict[tuple[int, int], list[_Overlap]] = {}

    def traffic(self, indices: Iterable[int]) -> Traffic:
        """Return rows and results of a bucket of some matrices."""
        traffic, cost = Traffic(Counter(), {}), self._stacking.cost
        for index in indices:
            owners = self._stacking.owners[index]
            for holders, part, elements in self._overlaps_of(index):
                owner = owners[part]
                source = nearest_holder(holders, owner, cost)
                if source != owner:
                    traffic.gathered[source, owner] += elements
                if self._has_replicas and (len(holders) > 1 or source != owner):
                    traffic.results.setdefault(holders, Counter())[owner] += elements
        return traffic

    def sizes(self, indices: Sequence[int], num_scatters: int) -> dict[int, RankSizes]:
        """Return the buffers of every rank for a bucket of some matrices."""
        stacks = self._stacking.stacks(indices)
        scatters: dict[int, list[list[int]]] = defaultdict(
            lambda: [[0, 0] for _ in range(num_scatters)]
        )
        if self._has_replicas:
            traffic = self.traffic(indices)
            sent, received = traffic.totals()
            for number, shard in traffic.scatters(num_scatters, self._stacking.cost):
                for share in shard.shares:
                    scatters[share.owner][number][0] += share.num_elements
                for holder in shard.holders:
                    scatters[holder][number][1] += shard.num_elements
        else:
            sent, received = self._totals(indices)
        sizes = {}
        for rank in {**sent, **received, **stacks, **scatters}:
            rows = sent[rank], received[rank]
            results = (
                tuple(ScatterSizes(*elements) for elements in scatters[rank])
                if self._has_replicas
                else (ScatterSizes(rows[1], rows[0]),)
            )
            own = sum(stack.num_elements for stack in stacks.get(rank, ()))
            sizes[rank] = RankSizes(BucketSizes(*rows, own), results)
        return sizes

    def _totals(self, indices: Iterable[int]) -> tuple[Counter[int], Counter[int]]:
        """Return the rows that each rank sends and receives, where no shard has replicas.

        All shards of a matrix go to its owners: matrices with equal layouts are counted together,
        as ranks times matrices are many millions.
        """
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        groups: dict[int, list[int]] = defaultdict(list)
        for index in indices:
            groups[id(self._overlaps_of(index))].append(index)
        for group in groups.values():
            elements = {
                (source, part): number for (source,), part, number in self._overlaps_of(group[0])
            }
            of_part: Counter[int] = Counter()
            for (source, part), number in elements.items():
                sent[source] += number * len(group)
                of_part[part] += number
            for index in group:
                for part, owner in enumerate(self._stacking.owners[index]):
                    # Its own rows stay.
                    own = elements.get((owner, part), 0)
                    sent[owner] -= own
                    received[owner] += of_part[part] - own
        return +sent, +received

    def _overlaps_of(self, index: int) -> list[_Overlap]:
        matrix, num_parts = self._stacking.matrices[index], len(self._stacking.owners[index])
        key = id(matrix.elements_by_rank), num_parts
        if key not in self._overlaps:
            elements: Counter[tuple[tuple[int, ...], int]] = Counter()
            parts = [
                parts_of(index, block, shape, tuple(range(num_parts)))
                for block, shape in enumerate(matrix.blocks)
            ]
            for region in matrix.regions:
                for part, _, num_rows, _, num_cols in overlaps(region, parts[region.block]):
                    elements[region.holders, part.owner] += num_rows * num_cols
            self._overlaps[key] = [_Overlap(*cell, count) for cell, count in elements.items()]
        return self._overlaps[key]
