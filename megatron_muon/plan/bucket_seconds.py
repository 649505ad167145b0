# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What the matrices of a bucket take on each rank."""

from collections import defaultdict
from collections.abc import Sequence

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.holder_links import HolderLinks
from megatron_muon.plan.step_estimate import BucketSeconds
from megatron_muon.plan.travelling_matrix import TravellingMatrix
from megatron_muon.plan.wire import Wire


def seconds_of(matrices: Sequence[TravellingMatrix], cost: CostModel, wire: Wire) -> BucketSeconds:
    """Add up what matrices take on each rank.

    Args:
        matrices: The matrices.
        cost: Rates of the machine.
        wire: What travels.
    """
    load_s: dict[int, float] = defaultdict(float)
    gather_s: dict[int, float] = defaultdict(float)
    scatter_s: dict[int, float] = defaultdict(float)
    edge_s: dict[int, float] = defaultdict(float)
    sum_s: dict[int, float] = defaultdict(float)
    spread_s: dict[tuple[int, ...], float] = defaultdict(float)
    # In parameter order: sums of floats depend on it, and plans are compared across versions.
    for matrix in sorted(matrices, key=lambda matrix: matrix.index):
        for owner in matrix.owners:
            load_s[owner] += matrix.load_s
            gather_s[owner] += matrix.gather_s[owner]
            scatter_s[owner] += matrix.scatter_s[owner]
            edge_s[owner] += matrix.edge_s
            sum_s[owner] += matrix.sum_s
        for holders, seconds in matrix.spread_s.items():
            spread_s[holders] += seconds
    links = HolderLinks(matrices, cost)
    # A link carries both directions at once: the longer one counts.
    for rank, seconds in links.one_byte_s.items():
        gather_s[rank] = max(gather_s[rank], wire.gather_bytes * seconds)
        scatter_s[rank] = max(scatter_s[rank], wire.scatter_bytes * seconds)
    return BucketSeconds(
        dict(load_s),
        dict(gather_s),
        dict(scatter_s),
        {rank: seconds for holders, seconds in spread_s.items() for rank in holders},
        dict(edge_s),
        dict(sum_s),
        {
            owner: wire.gather_bytes * seconds
            for owner, seconds in links.one_byte_s_of_sources.items()
        },
    )
