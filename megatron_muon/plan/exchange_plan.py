# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a domain: owners and buckets of its matrices; built once, no torch."""

import dataclasses
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_muon.plan.buckets import Buckets, bucket_choices
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, MatrixShape, Ranks
from megatron_muon.plan.owners import choose_owners
from megatron_muon.plan.routes import Part, Stack, parts_of
from megatron_muon.plan.settings import CommDtypes, PlanSettings


@dataclass(frozen=True)
class ExchangePlan:
    """Owners and buckets of a list of matrices, equal on all ranks that have them.

    ``plan_matrices()`` makes one; ``RankPlan`` is the part of one rank.

    Args:
        matrices: Layouts, in parameter order.
        owners: Owners by matrix.
        cost: Rates of the machine, and sizes of stacks.
        dtypes: Dtypes of rows and results.
        local: Indices of the local matrices, ascending.
        buckets: Indices of the matrices by bucket, ascending.
        staging_bytes: Memory of messages and stacks on the fullest rank, if it has no other plan.
    """

    matrices: tuple[MatrixLayout, ...]
    owners: tuple[Ranks, ...]
    cost: CostModel
    dtypes: CommDtypes
    local: tuple[int, ...]
    buckets: Buckets = ()
    staging_bytes: int = 0

    @cached_property
    def ranks(self) -> Ranks:
        """Ranks that join the collectives of the plan, ascending."""
        # Most matrices have one tuple of ranks: thousands of them are walked once.
        return tuple(sorted(set().union(*{matrix.ranks for matrix in self.matrices})))

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

    def entries(self) -> list[str]:
        """Describe owners and buckets for comparison by ranks, a line a matrix."""
        bucket_of = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        return [
            f"{matrix.name} owners {owners} bucket {bucket_of.get(index, 'local')}"
            for index, (matrix, owners) in enumerate(zip(self.matrices, self.owners, strict=True))
        ]


def layout_entries(matrices: Sequence[MatrixLayout]) -> list[str]:
    """Describe layouts for comparison by ranks, a line a matrix."""
    # A checksum of the regions: their text would be megabytes for a large model, and the line
    # names the matrix anyway. Layers share their regions, maybe thousands.
    regions = {id(matrix.regions): matrix.regions for matrix in matrices}
    checksums = {key: zlib.crc32(repr(tiling).encode()) for key, tiling in regions.items()}
    return [
        f"{matrix.name} {matrix.blocks} layout {checksums[id(matrix.regions)]:08x}"
        f"{' transposed' if matrix.is_transposed else ''}"
        for matrix in matrices
    ]


def plan_matrices(
    matrices: Sequence[MatrixLayout],
    settings: PlanSettings,
    fullest_bytes: Callable[[ExchangePlan], int],
) -> ExchangePlan:
    """Plan the matrices of a domain, listed in the same order on all of its ranks.

    Args:
        matrices: Layouts.
        settings: Rates, dtypes and maximum number of owners, and memory of this plan on a rank. If
            no number of buckets fits, the plan needs more.
        fullest_bytes: Returns the staging memory of the fullest rank for some buckets; in a run the
            maximum of all ranks, which plan together.
    """
    # Nothing here depends on the rank that builds the plan: all ranks must get the same.
    all_owners = choose_owners(matrices, settings)
    local: list[int] = []
    exchanged: list[int] = []
    for index, (matrix, owners) in enumerate(zip(matrices, all_owners, strict=True)):
        # Not "all rows are on the owners": a matrix that is split over just the ranks that hold its
        # replicas still exchanges parts.
        is_local = len(owners) == 1 and all(region.holders == owners for region in matrix.regions)
        (local if is_local else exchanged).append(index)
    plan = ExchangePlan(tuple(matrices), all_owners, settings.cost, settings.dtypes, tuple(local))
    for buckets in bucket_choices(exchanged, matrices, all_owners, settings):
        plan = dataclasses.replace(plan, buckets=buckets)
        plan = dataclasses.replace(plan, staging_bytes=fullest_bytes(plan))
        if plan.staging_bytes <= settings.staging_bytes:
            break
    return plan


def staging_problem(
    plans: Sequence[ExchangePlan], needed: int, staging_bytes: int | None
) -> str | None:
    """Return an error if plans of a rank need more bytes, in one arena, than the limit."""
    # A rank may have no matrices, and so no plan.
    if staging_bytes is None or needed <= staging_bytes:
        return None
    largest = max(plans, key=lambda plan: plan.staging_bytes)
    matrix = max(largest.matrices, key=lambda matrix: matrix.num_elements)
    # Plans share a limit equally. Buffers of several plans may leave gaps between them: a tenth is
    # added.
    enough = max(needed, len(plans) * largest.staging_bytes)
    enough += enough // 10 if len(plans) > 1 else 0
    return (
        f"staging memory: expected at most {staging_bytes:,} bytes a rank, got {needed:,} for "
        f"messages and stacks of {len(plans)} {'plans' if len(plans) > 1 else 'plan'}; the largest "
        f"matrix, {matrix.name}, has {matrix.num_elements * largest.dtypes.gather_bytes:,}. Set "
        f"exchange.staging_bytes to {enough} or more, or shard the model over more ranks."
    )
