# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Place matrices on ranks up to a capacity: largest first, then local search.

All ties are broken by index and rank, so every rank of a job finds the same.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from megatron_muon.plan.cost import CostModel, HeldElements, WireBytes
from megatron_muon.plan.layout import MatrixLayout

type Owners = tuple[int, ...]

# Local search ends after as many moves and passes, tries as many holders, and pairs of at most as
# many matrices: it stays within seconds for tens of thousands of matrices.
_MAX_RELIEFS = 2000
_MAX_TARGETS = 16
_MAX_PASSES = 5
_MAX_PAIRED_MATRICES = 200
_SMALLEST_GAIN = 1e-9


class Candidate:
    """One matrix to place: its time, and the traffic each choice of owners means.

    Args:
        matrix: Its layout.
        ranks: Those that may own it; the same object for all matrices of a domain.
        num_parts: Ranks it is cut over.
        seconds: Newton-Schulz time on each of them.
        cost: Rates of the machine.
        wire: Bytes an element takes.
    """

    def __init__(
        self,
        matrix: MatrixLayout,
        ranks: tuple[int, ...],
        num_parts: int,
        seconds: float,
        cost: CostModel,
        wire: WireBytes,
    ) -> None:
        self.ranks = ranks
        self.num_parts = num_parts
        self.seconds = seconds
        self.held = matrix.elements_by_rank
        self._elements = HeldElements(self.held, cost)
        # Of several copies one goes there, and all come back.
        there = wire.there * matrix.num_elements / self._elements.num_copies
        self._element_bytes = there + wire.back
        self._traffic: dict[Owners, float] = {}

    @property
    def is_movable(self) -> bool:
        """Whether it is placed by itself: neither cut nor whole on a single rank."""
        return self.num_parts == 1 and len(self.held) > 1

    @cached_property
    def choices(self) -> list[Owners]:
        """Holders, least traffic first; where it is cut, sets of consecutive ranks."""
        owners = list(self.sets_of_ranks()) if self.num_parts > 1 else [(r,) for r in self.held]
        return sorted(owners, key=lambda each: (self.traffic(each), each))

    def sets_of_ranks(self) -> Iterator[Owners]:
        """Yield the sets of owners that may share it, each within a node where nodes align."""
        for start in range(0, len(self.ranks) - self.num_parts + 1, self.num_parts):
            yield self.ranks[start : start + self.num_parts]

    def traffic(self, owners: Owners) -> float:
        """Estimate the time that its rows take over the links of its owners, both ways."""
        seconds = self._traffic.get(owners)
        if seconds is None:
            one_byte = sum([self._elements.seconds_per_byte(owner) for owner in owners])
            seconds = one_byte * self._element_bytes / len(owners)
            self._traffic[owners] = seconds
        return seconds


class Placement:
    """Owners of all matrices, and the load they make.

    Args:
        candidates: The matrices.
        busy: Load of each rank before any is placed, seconds.
    """

    def __init__(self, candidates: Sequence[Candidate], busy: Mapping[int, float]) -> None:
        self.owners: list[Owners] = [()] * len(candidates)
        self.load = dict(busy)
        self._candidates = candidates
        self._on_rank: dict[int, set[int]] = defaultdict(set)
        # Heaps of loads, by domain and of all ranks; entries that are no longer true are skipped.
        self._quiet: dict[int, list[tuple[float, int]]] = {}
        self._domains_of: dict[int, list[int]] = defaultdict(list)
        self._busy = [(-load, rank) for rank, load in self.load.items()]
        heapq.heapify(self._busy)
        for each in candidates:
            if id(each.ranks) not in self._quiet:
                heap = [(self.load[rank], rank) for rank in each.ranks]
                heapq.heapify(heap)
                self._quiet[id(each.ranks)] = heap
                for rank in each.ranks:
                    self._domains_of[rank].append(id(each.ranks))
        movable = [i for i, each in enumerate(candidates) if each.is_movable]
        self._paired = movable if len(movable) <= _MAX_PAIRED_MATRICES else []

    @property
    def busiest(self) -> float:
        """Load of the busiest rank, seconds."""
        return max(self.load.values(), default=0.0)

    @property
    def is_cheapest(self) -> bool:
        """Whether every matrix is where it causes the least traffic."""
        return all(
            owners == each.choices[0]
            for each, owners in zip(self._candidates, self.owners, strict=True)
        )

    @cached_property
    def traffic(self) -> float:
        """Traffic over the links of all owners, seconds."""
        return sum(
            each.traffic(owners) for each, owners in zip(self._candidates, self.owners, strict=True)
        )

    def place(self, index: int, owners: Owners) -> None:
        """Give a matrix to its owners, who take it over from those before."""
        seconds = self._candidates[index].seconds
        for rank in self.owners[index]:
            self._on_rank[rank].discard(index)
            self._add(rank, -seconds)
        for rank in owners:
            self._on_rank[rank].add(index)
            self._add(rank, seconds)
        self.owners[index] = owners

    def _add(self, rank: int, seconds: float) -> None:
        load = self.load[rank] = self.load[rank] + seconds
        heapq.heappush(self._busy, (-load, rank))
        for domain in self._domains_of[rank]:
            heapq.heappush(self._quiet[domain], (load, rank))

    def _quietest_rank(self, ranks: tuple[int, ...]) -> int:
        heap = self._quiet[id(ranks)]
        while heap[0][0] != self.load[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1]

    def _busiest_rank(self) -> int:
        while -self._busy[0][0] != self.load[self._busy[0][1]]:
            heapq.heappop(self._busy)
        return self._busy[0][1]

    def place_in_turn(self) -> None:
        """Give each matrix to the next rank of those that may own it."""
        for index, each in enumerate(self._candidates):
            first = index % (len(each.ranks) // each.num_parts) * each.num_parts
            self.place(index, each.ranks[first : first + each.num_parts])

    def fill(self, capacity: float) -> None:
        """Place every matrix: those whole on one rank first, then the longest.

        Each goes to the owner with the least traffic among those that stay within the capacity;
        else to whoever has the least load.
        """
        order = sorted(
            range(len(self._candidates)),
            key=lambda i: (len(self._candidates[i].held) > 1, -self._candidates[i].seconds, i),
        )
        for index in order:
            self.place(index, self._cheapest_within(index, capacity) or self._quietest(index))

    def _cheapest_within(self, index: int, capacity: float) -> Owners | None:
        each = self._candidates[index]
        room = capacity - each.seconds
        for owners in each.choices:
            if max([self.load[rank] for rank in owners]) <= room:
                return owners
        return None

    def _quietest(self, index: int) -> Owners:
        """Return the owners with the least load; of equal ones those with the least traffic."""
        each = self._candidates[index]
        best = min(each.choices, key=lambda owners: max([self.load[rank] for rank in owners]))
        if each.num_parts == 1:
            rank = self._quietest_rank(each.ranks)
            if self.load[rank] < self.load[best[0]]:
                return (rank,)
        return best

    def relieve(self, capacity: float) -> None:
        """Move or exchange matrices of the busiest rank while that lowers its load."""
        for _ in range(_MAX_RELIEFS):
            busiest = self._busiest_rank()
            if self.load[busiest] <= capacity or not self._relieve(busiest, capacity):
                return

    def _relieve(self, busiest: int, capacity: float) -> bool:
        """Make the best move or exchange off a rank: down to the capacity, with least traffic."""
        load = self.load
        best = (load[busiest] * (1 - _SMALLEST_GAIN), 0.0)
        moves: list[tuple[int, Owners]] = []
        for index in sorted(self._on_rank[busiest]):
            each = self._candidates[index]
            if each.num_parts > 1 or each.seconds == 0.0:
                continue
            now = each.traffic((busiest,))
            left = load[busiest] - each.seconds
            targets = [(self._quietest_rank(each.ranks),), *each.choices[:_MAX_TARGETS]]
            for target in targets:
                if target[0] == busiest:
                    continue
                found = (max(load[target[0]] + each.seconds, left, capacity), -now)
                if found[0] < best[0] or (found[0] == best[0] and moves):
                    found = (found[0], each.traffic(target) - now)
                    if found < best:
                        best, moves = found, [(index, target)]
                for other, gain, more in self._exchanges(index, busiest, target[0]):
                    # What comes back adds to this rank what it takes from the other.
                    found = (
                        max(load[target[0]] + gain, load[busiest] - gain, capacity),
                        more,
                    )
                    if found < best:
                        best, moves = found, [(index, target), (other, (busiest,))]
        for index, owners in moves:
            self.place(index, owners)
        return bool(moves)

    def _exchanges(self, index: int, rank: int, peer: int) -> Iterator[tuple[int, float, float]]:
        """Yield the matrices of a peer that could come back for one of this rank.

        Yields:
            The other matrix, the load that the peer gains, and the traffic that both add.
        """
        each = self._candidates[index]
        if not (self._paired and each.is_movable):
            return
        for number in self._paired:
            other = self._candidates[number]
            if self.owners[number] == (peer,) and rank in other.held:
                more = each.traffic((peer,)) - each.traffic((rank,))
                more += other.traffic((rank,)) - other.traffic((peer,))
                yield number, each.seconds - other.seconds, more

    def save_traffic(self, capacity: float) -> None:
        """Move or exchange matrices where that saves traffic and stays within the capacity."""
        movable = [i for i, each in enumerate(self._candidates) if each.is_movable]
        for _ in range(_MAX_PASSES):
            has_changed = False
            for index in movable:
                each = self._candidates[index]
                enough = each.traffic(self.owners[index]) - _SMALLEST_GAIN * each.seconds
                for target in each.choices:
                    if each.traffic(target) >= enough:
                        break
                    if self._saves(index, target, capacity):
                        has_changed = True
                        break
            if not has_changed:
                return

    def _saves(self, index: int, target: Owners, capacity: float) -> bool:
        (rank,), (peer,) = self.owners[index], target
        each = self._candidates[index]
        if self.load[peer] + each.seconds <= capacity:
            self.place(index, target)
            return True
        for other, gain, more in self._exchanges(index, rank, peer):
            fits = max(self.load[peer] + gain, self.load[rank] - gain) <= capacity
            if fits and more < -_SMALLEST_GAIN * each.seconds:
                self.place(index, target)
                self.place(other, (rank,))
                return True
        return False
