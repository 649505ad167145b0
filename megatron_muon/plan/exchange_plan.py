# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a domain: who owns what, and what travels together. Built once, without torch."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_muon.newton_schulz.registry import BACKENDS
from megatron_muon.plan.assignment import Assignment
from megatron_muon.plan.buckets import TravellingMatrix, choose_buckets
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.routes import Route, Transfer, routes_of, transfers_of
from megatron_muon.plan.schedule import Depth
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds
from megatron_muon.plan.wire import Wire

# Buffers of a bucket's size that a step has room for: more gathers and scatters are under way only
# up to there. One bucket under way beside the one in work takes up to six.
STAGED_BUFFERS = 8


@dataclass(frozen=True)
class ExchangePlan:
    """Owners and buckets of a list of matrices, equal on every rank of the domain.

    :meth:`build` makes one; :class:`~megatron_muon.plan.rank_plan.RankPlan` is what one rank does
    of it.

    Args:
        matrices: Layouts, in parameter order.
        assignment: Their owners.
        cost: Rates of the machine, and sizes of stacks.
        wire: What travels.
        local: Indices of the local matrices, ascending.
        buckets: Indices of the matrices of each bucket, ascending.
        max_numel: Most elements that a rank stages in one bucket.
        seconds: What each bucket takes.
        depth: How many buckets are under way.
        predicted_step_s: Estimated seconds of a step, with what ranks do besides this plan.
        bound_s: Seconds that it takes at least with these owners, whatever the buckets are.

    Raises:
        ValueError: A matrix is in no bucket or in several, has no owner or one outside of its
            domain, or counts as local although rows of it would travel.
    """

    matrices: tuple[MatrixLayout, ...]
    assignment: Assignment
    cost: CostModel
    wire: Wire
    local: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    max_numel: int
    seconds: tuple[BucketSeconds, ...]
    depth: Depth
    predicted_step_s: float
    bound_s: float

    @classmethod
    def build(
        cls,
        matrices: Sequence[MatrixLayout],
        assignment: Assignment,
        cost: CostModel,
        wire: Wire,
        *,
        bucket_numel: int,
        num_kinds: int = 1,
    ) -> "ExchangePlan":
        """Sort matrices into local ones and buckets.

        Args:
            matrices: Layouts, in parameter order.
            assignment: Their owners.
            cost: Rates of the machine, and sizes of stacks.
            wire: What travels.
            bucket_numel: Most elements that a rank owns in one bucket, or sends back where shards
                have replicas. One larger matrix raises the bound for all buckets: see
                ``max_numel``.
            num_kinds: Plans of a rank: experts and dense matrices share its memory.
        """
        # Nothing here depends on the rank that builds the plan: every rank must come to the same.
        owners = assignment.owners
        local = [i for i, matrix in enumerate(matrices) if _is_local(matrix, owners[i])]
        travelling = [
            TravellingMatrix.of(index, matrix, owners[index], cost, wire)
            for index, matrix in enumerate(matrices)
            if not _is_local(matrix, owners[index])
        ]
        # What is left of a rank's load: local matrices, which need no other rank, and earlier
        # plans, whose rounds come between those of this one. That these wait for others is left
        # out here; the report has all plans.
        local_load_s = dict(assignment.load_s)
        for matrix in travelling:
            for owner in matrix.owners:
                local_load_s[owner] = max(0.0, local_load_s[owner] - matrix.load_s)
        # No bucket can be smaller than the largest matrix.
        max_numel = max([bucket_numel, *(matrix.staged_elements for matrix in travelling)])
        buckets = choose_buckets(
            travelling,
            _ranks_of(matrices),
            local_load_s,
            wire,
            max_numel=max_numel,
            staging_bytes=STAGED_BUFFERS * bucket_numel * wire.gather_bytes // num_kinds,
        )
        return cls(
            matrices=tuple(matrices),
            assignment=assignment,
            cost=cost,
            wire=wire,
            local=tuple(local),
            buckets=tuple(map(tuple, buckets.matrices)),
            max_numel=max_numel,
            seconds=buckets.seconds,
            depth=buckets.depth,
            predicted_step_s=buckets.step_s,
            bound_s=buckets.bound_s,
        )

    def __post_init__(self) -> None:
        """Check that every matrix is orthogonalized exactly once."""
        if len(self.owners) != len(self.matrices):
            raise ValueError(
                f"exchange plan: expected owners of {len(self.matrices)} matrices, got "
                f"{len(self.owners)}. Assign the matrices of this plan."
            )
        # A matrix that is in no list would silently never be stepped.
        listed = Counter(self.local)  # how often each matrix is listed
        for bucket in self.buckets:
            listed.update(bucket)
        for index, matrix in enumerate(self.matrices):
            owners = self.owners[index]
            if listed[index] != 1:
                raise ValueError(
                    f"{matrix.fqn}: expected to be local or in one bucket, got it listed "
                    f"{listed[index]} times. Build the plan with ExchangePlan.build()."
                )
            if not owners or not set(owners) <= set(matrix.ranks):
                raise ValueError(
                    f"{matrix.fqn}: expected owners among the ranks of its domain, got {owners}. "
                    "Assign the matrices of this plan."
                )
        for index in self.local:
            if not _is_local(self.matrices[index], self.owners[index]):
                raise ValueError(
                    f"{self.matrices[index].fqn}: expected a local matrix to be whole on its "
                    f"owner, got owners {self.owners[index]} and other holders. Put it into a "
                    "bucket."
                )

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Owners of each matrix."""
        return self.assignment.owners

    @property
    def plan_seconds(self) -> PlanSeconds:
        """What the plan takes."""
        return PlanSeconds(_ranks_of(self.matrices), self.seconds, self.depth)

    def routes(self, index: int) -> Iterator[Route]:
        """Yield the routes of a matrix."""
        return routes_of(index, self.matrices[index], self.owners[index], self.cost)

    def transfers(self, index: int) -> Iterator[Transfer]:
        """Yield what travels of a matrix."""
        return transfers_of(index, self.matrices[index], self.owners[index], self.cost)

    @cached_property
    def sets_of_owners(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that split a matrix, ascending."""
        return tuple(sorted({owners for owners in self.owners if len(owners) > 1}))

    def backend(self, index: int, block: int) -> str:
        """Return the name of what orthogonalizes a block of a matrix."""
        matrix = self.matrices[index]
        name = self.cost.backend_of(*matrix.blocks[block], len(self.owners[index]))
        # Equal copies stay equal only by equal operations, so no kernel chosen by timing.
        return (BACKENDS[name].reference or name) if matrix.has_copies else name

    def entries(self) -> list[str]:
        """Describe each matrix by a line, for comparing plans across ranks."""
        # A checksum of the regions: their text would be megabytes for a large model, and the line
        # names the matrix anyway.
        bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        return [
            f"{matrix.fqn} {matrix.blocks} owners {owners} bucket {bucket_of.get(index, 'local')} "
            f"layout {zlib.crc32(repr(matrix.regions).encode()):08x}"
            f"{' with copies' if matrix.has_copies else ''} "
            f"by {' '.join(self.backend(index, block) for block in range(len(matrix.blocks)))}"
            for index, (matrix, owners) in enumerate(zip(self.matrices, self.owners, strict=True))
        ]


def _ranks_of(matrices: Sequence[MatrixLayout]) -> list[int]:
    # Most matrices have one tuple of ranks: thousands of them are not gone through.
    return sorted(set().union(*{matrix.ranks for matrix in matrices}))


def _is_local(matrix: MatrixLayout, owners: tuple[int, ...]) -> bool:
    """Return whether nothing of a matrix travels: one owner, who is the only holder."""
    # Not "all rows lie on the owners": a matrix that is split over just the ranks that hold its
    # replicas still exchanges parts.
    return len(owners) == 1 and all(region.holders == owners for region in matrix.regions)
