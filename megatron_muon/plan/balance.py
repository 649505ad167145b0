# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Place matrices on ranks up to a capacity: longest first, then local search.

All ties are broken by index and rank, so every rank of a job finds the same owners.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel, HeldElements
from megatron_muon.plan.holder_links import SentElements, Tiling
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.rank_heap import RankHeap
from megatron_muon.plan.wire import Wire

type Owners = tuple[int, ...]

# Limits of the local search. Ten times larger ones change busiest / ideal and elements moved in
# none of the measured plans, to four digits, and take up to 18 times as long (Llama-3-70B, 64
# ranks). Measured: four presets at dp 64, Llama-3-8B on 512 ranks, and a real shard map.
_MAX_RELIEFS = 2000
_MAX_TARGETS = 16
_MAX_PASSES = 5
_MAX_PAIRED_MATRICES = 200
# A rank is given matrices while its links carry at most so many times the mean, or are busy for at
# most so much of the capacity, where all of it can be hidden. A rank that holds nothing of a matrix
# takes it only if that is at most so many times the traffic. Predicted step of Llama-3-70B with 8
# tensor-parallel ranks on 128 ranks in two instances: 32 ms, 48 without a limit.
_FAIR_LINK = 1.25
_HIDDEN_LINK = 0.1
# Gains below this share are rounding of sums that were built in another order.
_SMALLEST_GAIN = 1e-9


class Task:
    """A matrix to place: its load, and the traffic that each choice of owners causes.

    Matrices that lie alike may share one.

    Args:
        matrix: Its layout.
        ranks: Those that may own it; the same object for all matrices with equal ones.
        num_parts: Owners it is split over.
        load_s: Newton-Schulz seconds on each of them.
        cost: Rates of the machine.
        wire: Bytes an element takes.
    """

    ranks: tuple[int, ...]
    num_parts: int
    load_s: float
    held: dict[int, int]  # elements by rank
    num_elements: int
    cost: CostModel
    element_bytes: int  # that an element takes, both ways

    def __init__(
        self,
        matrix: MatrixLayout,
        ranks: tuple[int, ...],
        num_parts: int,
        load_s: float,
        cost: CostModel,
        wire: Wire,
    ) -> None:
        self.ranks = ranks
        self.num_parts = num_parts
        self.load_s = load_s
        self.held, self.num_elements = matrix.elements_by_rank, matrix.num_elements
        self.cost = cost
        self._elements = HeldElements(self.held, matrix.num_elements, cost)
        self.element_bytes = wire.gather_bytes + wire.scatter_bytes
        self._traffic_s: dict[Owners, float] = {}

    @property
    def num_shares(self) -> int:
        """See :class:`Tiling`."""
        return self.num_parts * round(sum(self.held.values()) / self.num_elements)

    @property
    def is_movable(self) -> bool:
        """Whether local search may move it: neither split nor whole on a single rank."""
        return self.num_parts == 1 and len(self.held) > 1

    @cached_property
    def candidates(self) -> list[Owners]:
        """Holders, least traffic first; sets of consecutive ranks where it is split."""
        owners = list(self._sets_of_ranks()) if self.num_parts > 1 else [(r,) for r in self.held]
        return sorted(owners, key=lambda choice: (self.traffic_s(choice), choice))

    def _sets_of_ranks(self) -> Iterator[Owners]:
        """Yield the sets of owners that may share it, each within a node where nodes align."""
        for start in range(0, len(self.ranks) - self.num_parts + 1, self.num_parts):
            yield self.ranks[start : start + self.num_parts]

    def traffic_s(self, owners: Owners) -> float:
        """Estimate the seconds that its rows take over the links of its owners, both ways."""
        seconds = self._traffic_s.get(owners)
        if seconds is None:
            one_byte = sum([self._elements.one_byte_seconds(owner) for owner in owners])
            seconds = one_byte * self.element_bytes / len(owners)
            self._traffic_s[owners] = seconds
        return seconds

    def link_s(self, owners: Owners) -> float:
        """Estimate the part of the traffic that goes over the links of each owner."""
        return self.traffic_s(owners) / len(owners)


class _Swap(NamedTuple):
    """A matrix that another rank could hand back for one that it takes over."""

    matrix: int
    gained_load_s: float  # of the other rank
    added_traffic_s: float


class _Move(NamedTuple):
    """Matrices that change owners together. Moves compare as tuples: the smallest is the best."""

    load_s: float  # of the busier of the two ranks
    added_traffic_s: float
    changes: tuple[tuple[int, Owners], ...]


class LoadBalancer:
    """Owners of all matrices, and the load that they make.

    Args:
        tasks: The matrices.
        initial_load_s: Load of each rank before any is placed, seconds.
    """

    owners: list[Owners]  # by matrix
    load_s: dict[int, float]  # by rank
    _link_s: dict[int, float]  # by rank, seconds of what it owns over its links, both ways

    def __init__(self, tasks: Sequence[Task], initial_load_s: Mapping[int, float]) -> None:
        self.owners = [()] * len(tasks)
        self.load_s = dict(initial_load_s)
        self._tasks = tasks
        self._on_rank: dict[int, set[int]] = defaultdict(set)
        self._busiest = RankHeap(self.load_s, self.load_s, is_descending=True)
        # Of each set of possible owners. By identity: a set may have thousands of ranks, and is
        # looked up once for each matrix.
        self._eligible = {id(task.ranks): task.ranks for task in tasks}
        self._quietest_of = {
            eligible: RankHeap(self.load_s, ranks) for eligible, ranks in self._eligible.items()
        }
        self._eligible_sets_of: dict[int, list[int]] = defaultdict(list)
        for eligible, ranks in self._eligible.items():
            for rank in ranks:
                self._eligible_sets_of[rank].append(eligible)
        # Swaps are looked for among these alone.
        movable = [index for index, task in enumerate(tasks) if task.is_movable]
        self._paired = movable if len(movable) <= _MAX_PAIRED_MATRICES else []
        self._link_s = dict.fromkeys(self.load_s, 0.0)
        least_s = sum(task.traffic_s(task.candidates[0]) for task in tasks)
        self._fair_link_s = _FAIR_LINK * least_s / max(1, len(self.load_s))

    @property
    def busiest_load_s(self) -> float:
        """Load of the busiest rank, seconds."""
        return max(self.load_s.values(), default=0.0)

    @property
    def is_cheapest(self) -> bool:
        """Whether every matrix is where it causes the least traffic."""
        return all(
            owners == task.candidates[0]
            for task, owners in zip(self._tasks, self.owners, strict=True)
        )

    @cached_property
    def traffic_s(self) -> float:
        """Traffic over the links of all owners, seconds."""
        return sum(
            task.traffic_s(owners) for task, owners in zip(self._tasks, self.owners, strict=True)
        )

    @cached_property
    def busiest_link_s(self) -> float:
        """Seconds of traffic over the busiest link, of an owner or of a holder."""
        tilings: dict[int, Tiling] = {}
        for task, owners in zip(self._tasks, self.owners, strict=True):
            if id(task) not in tilings:
                tilings[id(task)] = Tiling(task.held, task.num_shares, Counter())
            tilings[id(task)].owners.update(owners)
        if not tilings:
            return 0.0
        sent = SentElements(self._tasks[0].cost)
        sent.add_tilings(tilings.values())
        holders_s = max(sent.one_byte_seconds().values()) * self._tasks[0].element_bytes
        return max(holders_s, *self._link_s.values())

    def place(self, index: int, owners: Owners) -> None:
        """Hand a matrix to its owners, who take it over from those before."""
        task = self._tasks[index]
        for rank in self.owners[index]:
            self._on_rank[rank].discard(index)
            self._add(rank, -task.load_s)
            self._link_s[rank] -= task.link_s(self.owners[index])
        for rank in owners:
            self._on_rank[rank].add(index)
            self._add(rank, task.load_s)
            self._link_s[rank] += task.link_s(owners)
        self.owners[index] = owners

    def _add(self, rank: int, seconds: float) -> None:
        self.load_s[rank] += seconds
        self._busiest.push(rank)
        for eligible in self._eligible_sets_of[rank]:
            self._quietest_of[eligible].push(rank)

    def _quietest_rank(self, ranks: tuple[int, ...]) -> int:
        return self._quietest_of[id(ranks)].first()

    def place_in_turn(self) -> None:
        """Place by round robin: each matrix on the next rank of those that may own it."""
        for index, task in enumerate(self._tasks):
            # A split matrix takes the next set of ranks, aligned as in Task.candidates.
            first = index % (len(task.ranks) // task.num_parts) * task.num_parts
            self.place(index, task.ranks[first : first + task.num_parts])

    def fill(self, capacity_s: float) -> None:
        """Place every matrix: those whole on one rank first, then the longest.

        Each goes to the owner with the least traffic among those that stay within the capacity, and
        if possible within their share of traffic; otherwise to whoever has the least load.
        """
        # Whole ones first: they have no choice that costs no traffic but their holder.
        order = sorted(
            range(len(self._tasks)),
            key=lambda i: (len(self._tasks[i].held) > 1, -self._tasks[i].load_s, i),
        )
        for index in order:
            self.place(index, self._cheapest_within(index, capacity_s) or self._quietest(index))

    def _cheapest_within(self, index: int, capacity_s: float) -> Owners | None:
        task = self._tasks[index]
        room = capacity_s - task.load_s
        near: list[Owners] = []
        for owners in task.candidates:
            if max([self.load_s[rank] for rank in owners]) <= room:
                if self._has_fair_links(task, owners, capacity_s):
                    return owners
                near.append(owners)
        # Few ranks hold rows of a query, key and value, the same ones in all layers. Another rank,
        # which may have nothing to do, takes hardly more traffic. Llama-3-70B on 64 ranks: a
        # predicted step of 461 ms, 468 if holders alone are asked.
        if near and task.num_parts == 1:
            quietest = (self._quietest_rank(task.ranks),)
            is_near = task.traffic_s(quietest) <= _FAIR_LINK * task.traffic_s(near[0])
            if is_near and self.load_s[quietest[0]] <= room:
                near.append(quietest)
        return min(near, key=lambda owners: self._busiest_link_s(task, owners), default=None)

    def _busiest_link_s(self, task: Task, owners: Owners) -> float:
        """Return what the links of some ranks carry at most if they take a matrix."""
        return max([self._link_s[rank] for rank in owners]) + task.link_s(owners)

    def _has_fair_links(self, task: Task, owners: Owners, capacity_s: float) -> bool:
        """Return whether the links of some ranks stay within their share if they take a matrix.

        The first matrix of a rank always does.
        """
        most = self._most_on_link_s(capacity_s) - task.link_s(owners)
        return all(not self._on_rank[rank] or self._link_s[rank] <= most for rank in owners)

    def _most_on_link_s(self, capacity_s: float) -> float:
        """Return what a link may carry: a fair share, or what is surely hidden."""
        return max(self._fair_link_s, _HIDDEN_LINK * capacity_s)

    def _quietest(self, index: int) -> Owners:
        """Return the owners with the least load; of equal ones those with the least traffic."""
        task = self._tasks[index]
        best = min(task.candidates, key=lambda owners: max([self.load_s[r] for r in owners]))
        # A rank that holds nothing of the matrix is no candidate, but may have nothing to do.
        if task.num_parts == 1:
            rank = self._quietest_rank(task.ranks)
            if self.load_s[rank] < self.load_s[best[0]]:
                return (rank,)
        return best

    def relieve(self, capacity_s: float) -> None:
        """Take matrices off the busiest rank while that lowers the load, down to the capacity."""
        for _ in range(_MAX_RELIEFS):
            busiest = self._busiest.first()
            if self.load_s[busiest] <= capacity_s:
                return
            move = self._best_relief(busiest, capacity_s)
            if not move.changes:
                return
            for index, owners in move.changes:
                self.place(index, owners)

    def _best_relief(self, busiest: int, capacity_s: float) -> _Move:
        """Find the move or swap that leaves two ranks with the least load, then least traffic.

        Loads below the capacity count as the capacity: once a rank fits, only traffic matters.

        Invariant: ``best`` is the smallest move seen so far. It starts as "no change", which any
        move that lowers the load beats, and which no move of equal load may replace: otherwise two
        ranks could hand the same matrix back and forth for ever.
        """
        best = _Move(self.load_s[busiest] * (1 - _SMALLEST_GAIN), 0.0, ())
        for index in sorted(self._on_rank[busiest]):
            task = self._tasks[index]
            if task.num_parts > 1 or task.load_s == 0.0:
                continue
            traffic_now = task.traffic_s((busiest,))
            left = self.load_s[busiest] - task.load_s
            targets = [(self._quietest_rank(task.ranks),), *task.candidates[:_MAX_TARGETS]]
            for target in targets:
                if target[0] == busiest:
                    continue
                load_s = max(self.load_s[target[0]] + task.load_s, left, capacity_s)
                if load_s < best.load_s or (load_s == best.load_s and best.changes):
                    added = task.traffic_s(target) - traffic_now
                    if (load_s, added) < best[:2]:
                        best = _Move(load_s, added, ((index, target),))
                for swap in self._swaps(index, busiest, target[0]):
                    # What comes back adds to this rank what the other rank is spared.
                    load_s = max(
                        self.load_s[target[0]] + swap.gained_load_s,
                        self.load_s[busiest] - swap.gained_load_s,
                        capacity_s,
                    )
                    if (load_s, swap.added_traffic_s) < best[:2]:
                        changes = ((index, target), (swap.matrix, (busiest,)))
                        best = _Move(load_s, swap.added_traffic_s, changes)
        return best

    def _swaps(self, index: int, rank: int, other_rank: int) -> Iterator[_Swap]:
        """Yield the matrices of another rank that could come back for one of this rank."""
        task = self._tasks[index]
        # Pairs grow with the square of the matrices: left out where there are many, and where
        # small moves suffice to balance.
        if not (self._paired and task.is_movable):
            return
        for number in self._paired:
            other = self._tasks[number]
            if self.owners[number] == (other_rank,) and rank in other.held:
                added = task.traffic_s((other_rank,)) - task.traffic_s((rank,))
                added += other.traffic_s((rank,)) - other.traffic_s((other_rank,))
                yield _Swap(number, task.load_s - other.load_s, added)

    def relieve_links(self, capacity_s: float) -> None:
        """Take matrices off the busiest link while that lowers the most that a link carries.

        The rank that takes one stays within the capacity. Llama-3-70B with 8 tensor-parallel ranks
        on 128 ranks in two instances: a predicted step of 32.1 ms, 33.4 without; the rank that
        sends most sends 1.19 times the mean, 1.34 without.
        """
        # Others lose nothing, so a rank that has no room now gets none.
        shortest_s = min([task.load_s for task in self._tasks if task.is_movable], default=0.0)
        with_room = {rank for rank, load in self.load_s.items() if load + shortest_s <= capacity_s}
        quietest = {
            eligible: RankHeap(self._link_s, with_room.intersection(ranks))
            for eligible, ranks in self._eligible.items()
        }
        busiest_links = RankHeap(self._link_s, self._link_s, is_descending=True)
        for _ in range(_MAX_RELIEFS):
            busiest = busiest_links.first()
            if self._link_s[busiest] <= self._most_on_link_s(capacity_s):
                return
            best = self._best_link_relief(busiest, quietest, capacity_s)
            if best is None:
                return
            index, target = best
            self.place(index, (target,))
            for rank in (busiest, target):
                busiest_links.push(rank)
                for eligible in self._eligible_sets_of[rank]:
                    if rank in with_room:
                        quietest[eligible].push(rank)

    def _best_link_relief(
        self, busiest: int, quietest: Mapping[int, RankHeap], capacity_s: float
    ) -> tuple[int, int] | None:
        """Find the matrix and the rank that leave two links with the least, then least traffic.

        Args:
            busiest: The rank whose link carries most.
            quietest: Of each set of possible owners, by links, those with room for a matrix.
            capacity_s: Load that a rank may have.
        """
        now_s, most_s = self._link_s[busiest], self._most_on_link_s(capacity_s)
        found = None
        best = now_s * (1 - _SMALLEST_GAIN), 0.0
        others = {eligible: heap.first_few(_MAX_TARGETS) for eligible, heap in quietest.items()}
        for index in sorted(self._on_rank[busiest]):
            task = self._tasks[index]
            if not task.is_movable:
                continue
            left_s = now_s - task.link_s((busiest,))
            nearest = [owners[0] for owners in task.candidates[:_MAX_TARGETS]]
            for rank in dict.fromkeys([*nearest, *others[id(task.ranks)]]):
                if rank == busiest or self.load_s[rank] + task.load_s > capacity_s:
                    continue
                link_s = max(self._link_s[rank] + task.link_s((rank,)), left_s)
                added_s = task.traffic_s((rank,)) - task.traffic_s((busiest,))
                # Below what it may carry only traffic matters.
                link_s = max(link_s, most_s)
                if (link_s, added_s) < best:
                    best = link_s, added_s
                    found = index, rank
        return found

    def save_traffic(self, capacity_s: float) -> None:
        """Move or swap matrices where that saves traffic and stays within the capacity.

        Links of the target stay fair; those of a rank that a matrix comes back to are not checked.
        """
        movable = [index for index, task in enumerate(self._tasks) if task.is_movable]
        for _ in range(_MAX_PASSES):
            has_changed = False
            for index in movable:
                task = self._tasks[index]
                enough = task.traffic_s(self.owners[index]) - _SMALLEST_GAIN * task.load_s
                for target in task.candidates:
                    # Candidates come least traffic first: no later one saves more.
                    if task.traffic_s(target) >= enough:
                        break
                    if self._move_to_save_traffic(index, target, capacity_s):
                        has_changed = True
                        break
            if not has_changed:
                return

    def _move_to_save_traffic(self, index: int, target: Owners, capacity_s: float) -> bool:
        """Move a matrix to its target, alone or in a swap; return whether it fit there."""
        (rank,), (other_rank,) = self.owners[index], target
        task = self._tasks[index]
        is_much_cheaper = _FAIR_LINK * task.traffic_s(target) < task.traffic_s((rank,))
        if not is_much_cheaper and not self._has_fair_links(task, target, capacity_s):
            return False
        if self.load_s[other_rank] + task.load_s <= capacity_s:
            self.place(index, target)
            return True
        for swap in self._swaps(index, rank, other_rank):
            load_s = max(
                self.load_s[other_rank] + swap.gained_load_s,
                self.load_s[rank] - swap.gained_load_s,
            )
            is_cheaper = swap.added_traffic_s < -_SMALLEST_GAIN * task.load_s
            if load_s <= capacity_s and is_cheaper:
                self.place(index, target)
                self.place(swap.matrix, (rank,))
                return True
        return False
