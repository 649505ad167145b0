# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which matrices are exchanged together, and how much is in flight: rules, no search.

Buckets are slices of time: every bucket has about the same share of every owner's work. None is
shorter than the longest matrix, or so short that its collectives cost more than they can hide, and
there are as many as the busiest owner has time for. Only memory changes that: fewer buckets are in
flight, results come in more scatters, or there are more buckets.

Rejected: a bucket for each layer, or slices in parameter order. A layer has a handful of matrices,
and in every bucket most ranks would wait for the few that own some.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.plan.schedule import Depth, PlanOrder
from megatron_muon.plan.sizes import RankSizes, SizeCounter, Stacking
from megatron_muon.plan.staging import PlanStaging, StagingLayout, aligned_size

# More buckets gain little.
_MAX_BUCKETS = 16
# The two collectives of a bucket may cost this fraction of its work. Measured on 4 CPU ranks with
# small matrices (hidden 128): 147 ms in one bucket, 198 ms in 16.
_MAX_OVERHEAD = 0.1
# Gathers in flight beside the bucket in work, and as many scatters. With two, a plan of 70B on 64
# ranks was predicted to take 18 % longer.
_DEPTH = 3
# Replicas pass one scatter on while another arrives: at least this many in a step.
_MIN_SCATTERS = 4
# Memory may ask for up to this many buckets, and scatters in a step.
_MAX_FOR_MEMORY = 64


@dataclass(frozen=True)
class ExchangedMatrix:
    """A matrix that has to be exchanged.

    Args:
        index: Index in the plan.
        owners: Its owners.
        load_ns: Newton-Schulz on each owner.
        layout_key: Equal for matrices with the same shards.
    """

    index: int
    owners: tuple[int, ...]
    load_ns: int
    layout_key: Hashable


class Buckets(NamedTuple):
    """The buckets of a plan.

    Args:
        matrices: Indices of the matrices of each bucket, ascending.
        order: What of them decides the order of a step.
        staging_bytes: Memory that they need on the fullest rank.
    """

    matrices: tuple[tuple[int, ...], ...]
    order: PlanOrder
    staging_bytes: int


def choose_buckets(
    matrices: Sequence[ExchangedMatrix],
    local: Sequence[int],
    stacking: Stacking,
    staging_bytes: int,
    *,
    has_replicas: bool,
    num_buckets: int | None = None,
    depth: int | None = None,
) -> Buckets:
    """Return the first buckets that fit into memory; those that need least where none do.

    Args:
        matrices: Matrices to exchange.
        local: Indices of local matrices.
        stacking: Stacks, owners and the wire.
        staging_bytes: Memory of a rank for messages and stacks.
        has_replicas: Whether any shard has several holders.
        num_buckets: Number of buckets to start from; None for the rule.
        depth: Gathers in flight to start from; None for the default.
    """
    local_bytes = {
        owner: max(stack.num_elements for stack in stacks) * stacking.wire.stack_bytes
        for owner, stacks in stacking.stacks(local).items()
    }
    if not matrices:
        order = PlanOrder(0, 1, Depth(1, 1), has_replicas)
        return Buckets((), order, aligned_size(max(local_bytes.values(), default=0)))
    start = num_buckets or _num_buckets(matrices, stacking)
    chooser = _Chooser(matrices, local_bytes, stacking, depth or _DEPTH, has_replicas)
    counts = [start]
    while counts[-1] < _MAX_FOR_MEMORY:
        counts.append(counts[-1] + max(1, counts[-1] // 4))
    for count in counts:
        # Most counts are refused by what a rank needs at any depth: only the others are laid out.
        if chooser.bound(count) <= staging_bytes:
            found = chooser.least(count, staging_bytes)
            if found.staging_bytes <= staging_bytes:
                return found
    return chooser.least(min(counts, key=chooser.bound), 0)


class _Chooser:
    """The orders of some matrices, and the memory that they need; see :func:`choose_buckets`."""

    def __init__(
        self,
        matrices: Sequence[ExchangedMatrix],
        local_bytes: Mapping[int, int],
        stacking: Stacking,
        depth: int,
        has_replicas: bool,
    ) -> None:
        self._matrices = matrices
        self._local_bytes = local_bytes
        self._stacking = stacking
        self._depth = depth
        self._has_replicas = has_replicas
        self._counter = SizeCounter(stacking, has_replicas=has_replicas)
        self._drafts: dict[tuple[int, bool], list[tuple[int, ...]]] = {}
        self._bounds: dict[int, int] = {}

    def bound(self, count: int) -> int:
        """Return the bytes that some rank needs at least with this number of buckets."""
        if count not in self._bounds:
            # Rows that have arrived, and the stacks that they are copied to.
            elements = min(
                max(map(self._counter.largest_rows, self._buckets(count, is_mixed)))
                for is_mixed in (True, False)
            )
            self._bounds[count] = elements * self._stacking.wire.gather_bytes
        return self._bounds[count]

    def least(self, count: int, staging_bytes: int) -> Buckets:
        """Return the first order that fits into memory, or the one that needs least."""
        found: Buckets | None = None
        for order in self._orders(count):
            buckets = self._buckets(count, order.depth.ahead > 1)
            needed, order = self._needed(buckets, order)
            if found is None or needed < found.staging_bytes:
                found = Buckets(tuple(buckets), order, needed)
            if needed <= staging_bytes:
                break
        assert found is not None
        return found

    def _orders(self, count: int) -> Iterator[PlanOrder]:
        scatters = -(-_MIN_SCATTERS // count) if self._has_replicas else 1
        while True:
            for ahead in range(self._depth, 0, -1):
                yield PlanOrder(count, scatters, Depth(ahead, ahead * scatters), self._has_replicas)
            if scatters > 1:
                yield PlanOrder(count, scatters, Depth(1, 1), self._has_replicas)
            scatters *= 2
            if not self._has_replicas or count * scatters > _MAX_FOR_MEMORY:
                return

    def _buckets(self, count: int, is_mixed: bool) -> list[tuple[int, ...]]:
        # At depth 1 nothing hides that ranks wait for each other: buckets by length end together.
        if (count, is_mixed) not in self._drafts:
            self._drafts[count, is_mixed] = _fill_buckets(self._matrices, count, is_mixed)
        return self._drafts[count, is_mixed]

    def _needed(
        self, buckets: Sequence[tuple[int, ...]], order: PlanOrder
    ) -> tuple[int, PlanOrder]:
        """Return the bytes of the fullest rank, and the order for the buckets that there are."""
        ahead, behind = order.depth
        depth = Depth(min(ahead, len(buckets)), min(behind, len(buckets) * order.num_scatters))
        order = order._replace(num_buckets=len(buckets), depth=depth)
        of_buckets = [self._counter.sizes(bucket, order.num_scatters) for bucket in buckets]
        profiles = _profiles(of_buckets, self._local_bytes)
        return _needed_bytes(profiles, order, self._stacking), order


def _num_buckets(matrices: Sequence[ExchangedMatrix], stacking: Stacking) -> int:
    """Return how often the shortest possible bucket fits into the time of the busiest owner."""
    cost = stacking.cost
    collectives_ns = 2 * cost.latency_ns(stacking.matrices[matrices[0].index].ranks)
    shortest_ns = (collectives_ns + cost.host_ns(0, 2)) / _MAX_OVERHEAD
    load_ns: Counter[int] = Counter()
    for matrix in matrices:
        for owner in matrix.owners:
            load_ns[owner] += matrix.load_ns
    shortest_ns = max(1, shortest_ns, *(matrix.load_ns for matrix in matrices))
    return max(1, min(_MAX_BUCKETS, round(max(load_ns.values()) / shortest_ns)))


@dataclass
class _Draft:
    """A bucket that is being filled."""

    matrices: list[int] = field(default_factory=list)
    load_ns: Counter[int] = field(default_factory=Counter)
    num_same_layout: Counter[Hashable] = field(default_factory=Counter)


def _fill_buckets(
    matrices: Sequence[ExchangedMatrix], count: int, is_mixed: bool
) -> list[tuple[int, ...]]:
    """Assign matrices to buckets, longest first, to where their owners have least to do.

    Args:
        matrices: The matrices.
        count: Number of buckets; there are fewer if there are not as many matrices.
        is_mixed: Whether ties go to the bucket with the fewest matrices of the same layout. Then no
            bucket has all matrices of a shape, whose few holders would send all that it gathers.
            Otherwise the longest matrices of all owners are together, and the ranks of a bucket are
            done together.
    """
    drafts = [_Draft() for _ in range(count)]
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.load_ns, matrix.index)):
        loads = [max(draft.load_ns[owner] for owner in matrix.owners) for draft in drafts]
        least_ns = min(loads)
        ties = [draft for draft, load_ns in zip(drafts, loads, strict=True) if load_ns == least_ns]
        draft = ties[0]
        if is_mixed:
            draft = min(ties, key=lambda draft: draft.num_same_layout[matrix.layout_key])
        draft.matrices.append(matrix.index)
        draft.num_same_layout[matrix.layout_key] += 1
        for owner in matrix.owners:
            draft.load_ns[owner] += matrix.load_ns
    # The shortest bucket first, so that work starts early. If matrices were assigned by length, the
    # two longest buckets are first and last: each then waits for one neighbor alone.
    found = [tuple(sorted(draft.matrices)) for draft in drafts if draft.matrices]
    return found[::-1] if is_mixed or len(found) < 3 else [found[0], *found[2:], found[1]]


# What a rank stages, for all buckets, and the bytes of its largest stack of local matrices.
type _Profiles = set[tuple[tuple[RankSizes, ...], int]]


def _profiles(
    of_buckets: Sequence[Mapping[int, RankSizes]], local_bytes: Mapping[int, int]
) -> _Profiles:
    """Return what ranks stage, without repetitions: most ranks stage the same."""
    num_scatters = len(next(iter(of_buckets[0].values())).scatters)
    nothing = RankSizes.nothing(num_scatters)
    by_rank: dict[int, list[RankSizes]] = defaultdict(lambda: [nothing] * len(of_buckets))
    for number, of_ranks in enumerate(of_buckets):
        for rank, sizes in of_ranks.items():
            by_rank[rank][number] = sizes
    found = {(tuple(sizes), local_bytes.get(rank, 0)) for rank, sizes in by_rank.items()}
    without = [local for rank, local in local_bytes.items() if rank not in by_rank]
    return found | {((nothing,) * len(of_buckets), max(without))} if without else found


def _needed_bytes(profiles: _Profiles, order: PlanOrder, stacking: Stacking) -> int:
    """Return the bytes that the fullest rank stages: those that its engine will allocate."""
    wire = stacking.wire
    stagings = []
    for of_buckets, local_bytes in profiles:
        buckets = [sizes.bucket.in_bytes(wire) for sizes in of_buckets]
        scatters = [size.in_bytes(wire) for sizes in of_buckets for size in sizes.scatters]
        total = sum(itertools.chain(*buckets, *scatters)) + local_bytes
        stagings.append((total, PlanStaging(order, buckets, scatters, local_bytes)))
    most = 0
    # The largest first: ranks whose buffers need less even without sharing are not laid out. Every
    # buffer, of which there are at most five for each scatter and one, is rounded up.
    slack = aligned_size(1) * (5 * len(next(iter(profiles))[0]) * order.num_scatters + 1)
    for total, staging in sorted(stagings, key=lambda each: -each[0]):
        if total + slack <= most:
            break
        most = max(most, StagingLayout.build([staging]).num_bytes)
    return most
