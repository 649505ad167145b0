# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a domain, or of a group of its instances: who owns what, what travels together.

Built once, without torch.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_muon.newton_schulz.registry import BACKENDS
from megatron_muon.plan.assignment import Assignment
from megatron_muon.plan.buckets import BucketChooser
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, on_ranks
from megatron_muon.plan.routes import Route, Transfer, routes_of, transfers_of
from megatron_muon.plan.schedule import PlanOrder
from megatron_muon.plan.stacking import Stacking
from megatron_muon.plan.step_estimate import BucketSeconds, PlanSeconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire


@dataclass(frozen=True)
class ExchangePlan:
    """Owners and buckets of a list of matrices, equal on all ranks that have them.

    :meth:`build` makes one; :class:`~megatron_muon.plan.rank_plan.RankPlan` is what one rank does
    of it.

    Args:
        matrices: Layouts, in parameter order.
        assignment: Their owners.
        cost: Rates of the machine, and sizes of stacks.
        wire: What travels.
        local: Indices of the local matrices, ascending.
        buckets: Indices of the matrices of each bucket, ascending.
        seconds: What each bucket takes.
        order: What of the plan decides the order of a step.
        staging_bytes: Estimated memory of messages and stacks on the fullest rank.
        predicted_step_s: Estimated seconds of a step, with what ranks do besides this plan.
        bound_s: Seconds that it takes at least with these owners, whatever the buckets are.
        num_groups: Groups of instances that run this plan, each on ranks of its own; see
            :mod:`megatron_muon.plan.domain_plan`.

    Raises:
        ValueError: A matrix is in no bucket or in several, has no owner or one outside of its
            domain, or counts as local although rows of it would travel. A rank has other replicas
            in one matrix than in another.
    """

    matrices: tuple[MatrixLayout, ...]
    assignment: Assignment
    cost: CostModel
    wire: Wire
    local: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    seconds: tuple[BucketSeconds, ...]
    order: PlanOrder
    staging_bytes: int
    predicted_step_s: float
    bound_s: float
    num_groups: int = 1

    @classmethod
    def build(
        cls,
        matrices: Sequence[MatrixLayout],
        assignment: Assignment,
        cost: CostModel,
        wire: Wire,
        *,
        staging_bytes: int,
        is_limit: bool = True,
        may_portion: bool = False,
        num_groups: int = 1,
    ) -> "ExchangePlan":
        """Sort matrices into local ones and buckets.

        Args:
            matrices: Layouts, in parameter order.
            assignment: Their owners.
            cost: Rates of the machine, and sizes of stacks.
            wire: What travels.
            staging_bytes: Memory of a rank for messages and stacks.
            is_limit: Whether a plan that takes more is refused by the caller. Where none fits, it
                is then the one that takes the least; otherwise a better one that takes little more.
            may_portion: Whether buckets are portioned where that shortens the step.
            num_groups: Groups of instances that run the plan.
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
        stacking = Stacking(matrices, owners, cost, wire)
        chooser = BucketChooser(
            travelling, local, _ranks_of(matrices), local_load_s, stacking, may_portion
        )
        buckets = chooser.choose(staging_bytes, is_limit=is_limit)
        return cls(
            matrices=tuple(matrices),
            assignment=assignment,
            cost=cost,
            wire=wire,
            local=tuple(local),
            buckets=buckets.matrices,
            seconds=buckets.seconds,
            order=buckets.order,
            staging_bytes=buckets.staging_bytes,
            predicted_step_s=buckets.step_s,
            bound_s=chooser.bound_s,
            num_groups=num_groups,
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

        _check_replicas(self.matrices)

    def on_ranks(self, rank_of: Mapping[int, int]) -> "ExchangePlan":
        """Return the plan of other ranks that do the same.

        Args:
            rank_of: By rank of this plan, the one that takes its place. Estimates stay those of
                this plan's ranks: they hold where both share nodes alike.
        """
        if all(rank == other for rank, other in rank_of.items()):
            return self
        return replace(
            self,
            matrices=tuple(on_ranks(self.matrices, rank_of)),
            assignment=self.assignment.on_ranks(rank_of),
            seconds=tuple(bucket.on_ranks(rank_of) for bucket in self.seconds),
        )

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Owners of each matrix."""
        return self.assignment.owners

    @cached_property
    def stacking(self) -> Stacking:
        """What may be stacked."""
        return Stacking(self.matrices, self.owners, self.cost, self.wire)

    @property
    def num_scatters(self) -> int:
        """Scatters of each bucket."""
        return self.order.num_scatters

    @property
    def plan_seconds(self) -> PlanSeconds:
        """What the plan takes."""
        ranks = _ranks_of(self.matrices)
        return PlanSeconds(ranks, self.seconds, self.order, self.cost.latency_seconds(ranks))

    def routes(self, index: int, holder: int | None = None) -> Iterator[Route]:
        """Yield the routes of a matrix, or those of which a rank is a holder."""
        return routes_of(
            index,
            self.matrices[index],
            self.owners[index],
            self.cost,
            holder,
            num_portions=self.num_portions(index),
        )

    def num_portions(self, index: int) -> int:
        """Return the gathers that bring a matrix; its bucket has as many or more."""
        # Copies of a matrix are to go through the same operations wherever they lie.
        if (
            not self.order.is_portioned
            or index in self._local_set
            or self.matrices[index].has_copies
        ):
            return 1
        return self.order.num_gathers

    @cached_property
    def _local_set(self) -> frozenset[int]:
        return frozenset(self.local)

    def transfers(self, index: int) -> Iterator[Transfer]:
        """Yield what travels of a matrix."""
        if self.num_portions(index) == 1:
            yield from transfers_of(index, self.matrices[index], self.owners[index], self.cost)
            return
        for route in self.routes(index):
            yield Transfer(
                route.owner, route.source, route.holders, route.num_elements, route.portion
            )

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
        """Describe each matrix by two lines, and the order, for comparing plans across ranks."""
        # What matrices are comes first: one that a rank lacks changes the owners of others.
        # A checksum of the regions: their text would be megabytes for a large model, and the line
        # names the matrix anyway.
        what = [
            f"{matrix.fqn} {matrix.blocks} "
            f"layout {zlib.crc32(repr(matrix.regions).encode()):08x}"
            f"{' with copies' if matrix.has_copies else ''}"
            f"{' transposed' if matrix.is_transposed else ''}"
            for matrix in self.matrices
        ]
        bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        who = [
            f"{matrix.fqn} owners {owners} bucket {bucket_of.get(index, 'local')} "
            f"by {' '.join(self.backend(index, block) for block in range(len(matrix.blocks)))}"
            for index, (matrix, owners) in enumerate(zip(self.matrices, self.owners, strict=True))
        ]
        return [*what, *who, str(self.order)]


def staging_problem(plans: Sequence[ExchangePlan], staging_bytes: int | None) -> str | None:
    """Describe a limit of memory that plans do not keep, or return None.

    Args:
        plans: Plans of a rank, experts and dense matrices, which have equal shares of the limit.
        staging_bytes: The limit; None for none.
    """
    # A rank may have no matrices, and so no plan.
    if staging_bytes is None or not plans:
        return None
    largest = max(plans, key=lambda plan: plan.staging_bytes)
    needed = len(plans) * largest.staging_bytes
    if needed <= staging_bytes:
        return None
    stacks = largest.stacking.elements(range(len(largest.matrices))).values()
    stack_bytes = max(size for sizes in stacks for size in sizes) * largest.wire.gather_bytes
    matrix = max(largest.matrices, key=lambda matrix: matrix.num_elements)
    kinds = f", equally for each of {len(plans)} kinds" if len(plans) > 1 else ""
    return (
        f"staging memory: expected a plan within {staging_bytes:,} bytes a rank{kinds}, got "
        f"{needed:,} for the one that takes the least; the largest matrix, {matrix.fqn}, has "
        f"{matrix.num_elements * largest.wire.gather_bytes:,}, the largest stack {stack_bytes:,}. "
        f"Set exchange.staging_bytes to {needed} or more, or shard the model over more ranks."
    )


def _ranks_of(matrices: Sequence[MatrixLayout]) -> list[int]:
    # Most matrices have one tuple of ranks: thousands of them are not gone through.
    return sorted(set().union(*{matrix.ranks for matrix in matrices}))


def _check_replicas(matrices: Sequence[MatrixLayout]) -> None:
    """Check that a rank passes results on among the same ranks in all matrices."""
    replicas: dict[int, tuple[int, ...]] = {}
    for matrix in matrices:
        for holders in {region.holders for region in matrix.regions}:
            for rank in holders:
                known = replicas.setdefault(rank, holders)
                if known != holders or list(holders) != sorted(holders):
                    raise ValueError(
                        f"{matrix.fqn}: expected the replicas of rank {rank} to be {known}, "
                        f"ascending, got {holders}. Plan matrices of other process groups apart."
                    )


def _is_local(matrix: MatrixLayout, owners: tuple[int, ...]) -> bool:
    """Return whether nothing of a matrix travels: one owner, who is the only holder."""
    # Not "all rows lie on the owners": a matrix that is split over just the ranks that hold its
    # replicas still exchanges parts.
    return len(owners) == 1 and all(region.holders == owners for region in matrix.regions)
