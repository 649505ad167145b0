# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the links of holders take for the rows that they send to owners.

All matrices of a kind may lie on the same few ranks. These then send all that a bucket of them
gathers, and no owner has its rows before they have.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.travelling_matrix import TravellingMatrix


class _Tiling(NamedTuple):
    """Matrices without replicas that lie alike, and have as many owners.

    Args:
        num_owners: Of each matrix.
        held: Elements by holder.
        owners: How many of the matrices each rank owns.
    """

    num_owners: int
    held: Mapping[int, int]
    owners: Counter[int]


class HolderLinks:
    """Links of the holders of some matrices.

    Args:
        matrices: The matrices.
        cost: Rates of links.
    """

    def __init__(self, matrices: Sequence[TravellingMatrix], cost: CostModel) -> None:
        self._matrices = matrices
        self._cost = cost

    @cached_property
    def _tilings(self) -> list[_Tiling]:
        # All layers of a kind have one tiling: its holders, thousands maybe, are gone through once.
        tilings: dict[tuple[int, int], _Tiling] = {}
        for matrix in self._matrices:
            if matrix.sent is None:
                held, num_owners = matrix.layout.elements_by_rank, len(matrix.owners)
                tiling = tilings.setdefault(
                    (id(held), num_owners), _Tiling(num_owners, held, Counter())
                )
                tiling.owners.update(matrix.owners)
        return list(tilings.values())

    @cached_property
    def one_byte_s(self) -> dict[int, float]:
        """Seconds in which each holder sends one byte of every element that leaves it."""
        # Elements are added up before they become seconds: sums of integers are the same on ranks
        # that share other tilings.
        near: Counter[int] = Counter()
        far: Counter[int] = Counter()
        for matrix in self._matrices:
            for rank, sent in (matrix.sent or {}).items():
                near[rank] += sent.near
                far[rank] += sent.far
        node = self._cost.node
        for num_owners, held, owners in self._tilings:
            on_node: Counter[int] = Counter()
            for owner, number in owners.items():
                on_node[node(owner)] += number
            total = owners.total()
            for rank, elements in held.items():
                # Every owner has an equal part of each holder's rows, or nearly.
                part = elements // num_owners
                in_node = on_node[node(rank)]
                near[rank] += part * (in_node - owners[rank])
                far[rank] += part * (total - in_node)
        gbps, gbps_between = self._cost.gbps, self._cost.gbps_between_nodes
        return {
            rank: (elements / gbps + far[rank] / gbps_between) * 1e-9
            for rank, elements in near.items()
        }

    @cached_property
    def one_byte_s_of_sources(self) -> dict[int, float]:
        """For each owner, the seconds of the slowest holder that sends to it."""
        slowest: dict[int, float] = defaultdict(float)
        one_byte_s = self.one_byte_s
        for _, held, owners in self._tilings:
            seconds = max(one_byte_s[rank] for rank in held)
            for owner in owners:
                slowest[owner] = max(slowest[owner], seconds)
        for matrix in self._matrices:
            if matrix.sent:
                seconds = max(one_byte_s[rank] for rank in matrix.sent)
                for owner in matrix.owners:
                    slowest[owner] = max(slowest[owner], seconds)
        return dict(slowest)
