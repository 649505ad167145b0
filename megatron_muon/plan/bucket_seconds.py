# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What the matrices of a bucket take on each rank."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.holder_links import SentElements, Tiling
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
    tilings = _tilings(matrices)
    sent = SentElements(cost)
    sent.add_tilings(tilings)
    for matrix in matrices:
        for rank, elements in (matrix.sent or {}).items():
            sent.add(rank, *elements)
    one_byte_s = sent.one_byte_seconds()
    # A link carries both directions at once: the longer one counts.
    for rank, seconds in one_byte_s.items():
        gather_s[rank] = max(gather_s[rank], wire.gather_bytes * seconds)
        scatter_s[rank] = max(scatter_s[rank], wire.scatter_bytes * seconds)
    sources_s: dict[int, float] = defaultdict(float)
    for held, _, owners in tilings:
        _raise_to(sources_s, owners, max(one_byte_s[rank] for rank in held))
    for matrix in matrices:
        if matrix.sent:
            _raise_to(sources_s, matrix.owners, max(one_byte_s[rank] for rank in matrix.sent))
    return BucketSeconds(
        dict(load_s),
        dict(gather_s),
        dict(scatter_s),
        {rank: seconds for holders, seconds in spread_s.items() for rank in holders},
        dict(edge_s),
        dict(sum_s),
        {owner: wire.gather_bytes * seconds for owner, seconds in sources_s.items()},
    )


def _tilings(matrices: Sequence[TravellingMatrix]) -> list[Tiling]:
    """Return the tilings of matrices without replicas.

    All layers of a kind have one: its holders, which may be thousands, are gone through once.
    """
    tilings: dict[tuple[int, int], Tiling] = {}
    for matrix in matrices:
        if matrix.sent is None:
            held, num_shares = matrix.layout.elements_by_rank, len(matrix.owners)
            key = id(held), num_shares
            if key not in tilings:
                tilings[key] = Tiling(held, num_shares, Counter())
            tilings[key].owners.update(matrix.owners)
    return list(tilings.values())


def _raise_to(largest: dict[int, float], ranks: Iterable[int], seconds: float) -> None:
    for rank in ranks:
        largest[rank] = max(largest[rank], seconds)
