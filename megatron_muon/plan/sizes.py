# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What ranks send, receive and orthogonalize in one bucket, in elements, for all ranks at once.

Messages and stacks of one rank are built from routes, see :mod:`megatron_muon.plan.rank_plan`. Here
the same routes are counted for thousands of ranks: for the memory that buckets need, and for
reports. Matrices of all layers share their shards, so those are walked once per bucket and not once
per matrix.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.replicas import ShardScatter, scatters_of
from megatron_muon.plan.routes import nearest_holder, overlaps, parts_of
from megatron_muon.plan.staging import BucketSizes, ScatterSizes
from megatron_muon.plan.wire import Wire


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
    """What may be stacked of some matrices.

    Args:
        matrices: Layouts.
        owners: Owners of each.
        cost: Sizes of stacks.
        wire: Decides whether rows are normalized before they are sent.
    """

    matrices: Sequence[MatrixLayout]
    owners: Sequence[tuple[int, ...]]
    cost: CostModel
    wire: Wire

    def is_stackable(self, index: int) -> bool:
        """Return whether blocks of a matrix may be orthogonalized in one call with others."""
        return (
            # Rows in fp32 are orthogonalized by upstream's function, which accepts one matrix.
            self.wire.normalizes
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


class _Cell(NamedTuple):
    """What a part of a matrix and a shard have in common.

    Args:
        holders: Ranks that hold the shard.
        part: Position of the part among the owners.
        num_elements: Elements.
        num_pieces: Rectangles.
    """

    holders: tuple[int, ...]
    part: int
    num_elements: int
    num_pieces: int


class Flow(NamedTuple):
    """What holders send of one part of all matrices with the same shards; without replicas.

    Args:
        held: By holder, elements of the part in one matrix.
        pieces: By holder, rectangles that these elements form.
        owners: By owner, number of these matrices of which it has the part.
    """

    held: Mapping[int, int]
    pieces: Mapping[int, int]
    owners: Mapping[int, int]


class OnOffNode(NamedTuple):
    """Elements to or from ranks of the same node, and of other nodes."""

    on_node: int = 0
    off_node: int = 0

    @property
    def total(self) -> int:
        """All elements."""
        return self.on_node + self.off_node


@dataclass
class BucketTraffic:
    """Rows and results of one bucket.

    Args:
        flows: Rows of matrices without replicas.
        pairs: Elements by source and owner, of matrices with replicas.
        results: Elements by holders and owner, of matrices with replicas; results for the owner's
            own shard are included, since its replicas get them from it.
        pieces: Rectangles by rank that it packs or unpacks, of matrices with replicas.
    """

    flows: list[Flow] = field(default_factory=list)
    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    results: dict[tuple[int, ...], Counter[int]] = field(default_factory=dict)
    pieces: Counter[int] = field(default_factory=Counter)

    def gather(self, cost: CostModel) -> tuple[dict[int, OnOffNode], dict[int, OnOffNode]]:
        """Return the rows that each rank sends, and those that it receives.

        Without replicas the scatter is the inverse: what was sent is received.
        """
        sent: Counter[tuple[int, bool]] = Counter()
        received: Counter[tuple[int, bool]] = Counter()
        for (source, owner), elements in self.pairs.items():
            on_node = cost.node(source) == cost.node(owner)
            sent[source, on_node] += elements
            received[owner, on_node] += elements
        for held, _, owners in self.flows:
            total, of_node, held_on_node = sum(owners.values()), Counter[int](), Counter[int]()
            for owner, number in owners.items():
                of_node[cost.node(owner)] += number
            for rank, elements in held.items():
                node = cost.node(rank)
                held_on_node[node] += elements
                # Its own parts stay.
                sent[rank, True] += elements * (of_node[node] - owners.get(rank, 0))
                sent[rank, False] += elements * (total - of_node[node])
            num_elements = held_on_node.total()
            for owner, number in owners.items():
                near = held_on_node[cost.node(owner)]
                received[owner, True] += number * (near - held.get(owner, 0))
                received[owner, False] += number * (num_elements - near)
        return _by_rank(sent), _by_rank(received)

    def num_pieces(self) -> Counter[int]:
        """Count the rectangles that each rank packs or unpacks."""
        found = Counter(self.pieces)
        for _, pieces, owners in self.flows:
            num_matrices, num_pieces = sum(owners.values()), sum(pieces.values())
            # Holders pack rows and unpack results; owners do the reverse.
            for rank, number in pieces.items():
                found[rank] += 2 * number * num_matrices
            for owner, number in owners.items():
                found[owner] += 2 * number * (num_pieces - pieces.get(owner, 0))
        return found

    def scatters(self, num_scatters: int, cost: CostModel) -> Iterator[tuple[int, ShardScatter]]:
        """Yield what replicas of each shard get in each scatter, with the scatter's number."""
        for holders, by_owner in self.results.items():
            yield from enumerate(scatters_of(holders, by_owner, num_scatters, cost))


def _by_rank(counts: Mapping[tuple[int, bool], int]) -> dict[int, OnOffNode]:
    return {
        rank: OnOffNode(counts.get((rank, True), 0), counts.get((rank, False), 0))
        for rank in dict.fromkeys(rank for rank, _ in counts)
    }


class RankSizes(NamedTuple):
    """What one rank stages for one bucket, in elements.

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
    """Count what buckets of some matrices send, receive and stage.

    Args:
        stacking: Matrices and owners.
        has_replicas: Whether any matrix has shards with several holders.
    """

    def __init__(self, stacking: Stacking, *, has_replicas: bool) -> None:
        self._stacking = stacking
        self._has_replicas = has_replicas
        self._cells: dict[tuple[int, int], list[_Cell]] = {}
        self._held: dict[tuple[int, int, int], tuple[dict[int, int], dict[int, int]]] = {}
        self._sizes: dict[tuple[tuple[int, ...], int], dict[int, RankSizes]] = {}

    def traffic(self, indices: Iterable[int], *, counts_pieces: bool = False) -> BucketTraffic:
        """Return rows and results of a bucket of some matrices.

        Args:
            indices: The matrices.
            counts_pieces: Whether :meth:`BucketTraffic.num_pieces` will be asked for.
        """
        traffic = BucketTraffic()
        if self._has_replicas:
            for index in indices:
                self._add_replicas(traffic, index)
                if counts_pieces:
                    self._add_pieces(traffic, index)
            return traffic
        owners_of: dict[tuple[int, int, int], Counter[int]] = defaultdict(Counter)
        for index in indices:
            owners = self._stacking.owners[index]
            shards = id(self._stacking.matrices[index].elements_by_rank)
            for part, owner in enumerate(owners):
                key = shards, len(owners), part
                if key not in self._held:
                    self._hold(index)
                owners_of[key][owner] += 1
        traffic.flows = [Flow(*self._held[key], owners) for key, owners in owners_of.items()]
        return traffic

    def _add_replicas(self, traffic: BucketTraffic, index: int) -> None:
        cost, owners = self._stacking.cost, self._stacking.owners[index]
        for holders, part, elements, _ in self._cells_of(index):
            owner = owners[part]
            source = nearest_holder(holders, owner, cost)
            if source != owner:
                traffic.pairs[source, owner] += elements
            if len(holders) > 1 or source != owner:
                traffic.results.setdefault(holders, Counter())[owner] += elements

    def _add_pieces(self, traffic: BucketTraffic, index: int) -> None:
        cost, owners = self._stacking.cost, self._stacking.owners[index]
        for holders, part, _, num_pieces in self._cells_of(index):
            owner = owners[part]
            # Every holder writes results; one of them packs rows, the owner unpacks and packs.
            traffic.pieces.update(dict.fromkeys(holders, num_pieces))
            traffic.pieces[nearest_holder(holders, owner, cost)] += num_pieces
            traffic.pieces[owner] += 2 * num_pieces

    def _hold(self, index: int) -> None:
        """Note which rank holds how much of each part of a matrix without replicas."""
        matrix, num_parts = self._stacking.matrices[index], len(self._stacking.owners[index])
        shards = id(matrix.elements_by_rank)
        for part in range(num_parts):
            self._held[shards, num_parts, part] = {}, {}
        for (holder,), part, elements, num_pieces in self._cells_of(index):
            held, pieces = self._held[shards, num_parts, part]
            held[holder], pieces[holder] = elements, num_pieces

    def _cells_of(self, index: int) -> list[_Cell]:
        matrix, num_parts = self._stacking.matrices[index], len(self._stacking.owners[index])
        key = id(matrix.elements_by_rank), num_parts
        if key not in self._cells:
            positions = tuple(range(num_parts))
            parts = [
                parts_of(index, block, shape, positions)
                for block, shape in enumerate(matrix.blocks)
            ]
            elements: Counter[tuple[tuple[int, ...], int]] = Counter()
            pieces: Counter[tuple[tuple[int, ...], int]] = Counter()
            for region in matrix.regions:
                for part, _, num_rows, _, num_cols in overlaps(region, parts[region.block]):
                    elements[region.holders, part.owner] += num_rows * num_cols
                    pieces[region.holders, part.owner] += 1
            self._cells[key] = [
                _Cell(*cell, number, pieces[cell]) for cell, number in elements.items()
            ]
        return self._cells[key]

    def largest_rows(self, indices: Sequence[int]) -> int:
        """Return the elements that an owner receives and stacks, on the rank with most of them."""
        _, received = self.traffic(indices).gather(self._stacking.cost)
        return max(
            sum(stack.num_elements for stack in stacks)
            + (received[owner].total if owner in received else 0)
            for owner, stacks in self._stacking.stacks(indices).items()
        )

    def sizes(self, indices: tuple[int, ...], num_scatters: int) -> dict[int, RankSizes]:
        """Return what every rank stages for a bucket of some matrices."""
        # Several depths are tried with the same buckets.
        key = indices, num_scatters
        if key not in self._sizes:
            self._sizes[key] = self._count_sizes(indices, num_scatters)
        return self._sizes[key]

    def _count_sizes(self, indices: Sequence[int], num_scatters: int) -> dict[int, RankSizes]:
        traffic = self.traffic(indices)
        sent, received = traffic.gather(self._stacking.cost)
        stacks = self._stacking.stacks(indices)
        scatters: dict[int, list[list[int]]] = defaultdict(
            lambda: [[0, 0] for _ in range(num_scatters)]
        )
        for number, shard in traffic.scatters(num_scatters, self._stacking.cost):
            for share in shard.shares:
                scatters[share.owner][number][0] += share.num_elements
            for holder in shard.holders:
                scatters[holder][number][1] += shard.num_elements
        found = {}
        nothing = OnOffNode()
        for rank in {**sent, **received, **stacks, **scatters}:
            rows = sent.get(rank, nothing).total, received.get(rank, nothing).total
            results = (
                tuple(ScatterSizes(*sizes) for sizes in scatters[rank])
                if self._has_replicas
                else (ScatterSizes(rows[1], rows[0]),)
            )
            own = sum(stack.num_elements for stack in stacks.get(rank, ()))
            found[rank] = RankSizes(BucketSizes(*rows, own), results)
        return found
