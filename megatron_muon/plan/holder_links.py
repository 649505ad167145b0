# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the links of holders take for the rows that they send to owners.

All matrices of a kind may lie on the same few ranks. These then send all that a bucket of them
gathers, and no owner has its rows before they have.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_muon.plan.cost import CostModel


class Tiling(NamedTuple):
    """Matrices that lie alike, and have as many owners.

    Args:
        held: Elements by holder.
        num_shares: Every owner is sent an equal share of each holder's rows, or nearly. There are
            as many as owners of a matrix, times its replicas.
        owners: How many of the matrices each rank owns.
    """

    held: Mapping[int, int]
    num_shares: int
    owners: Counter[int]


class SentElements:
    """Elements that holders send.

    They are added up before they become seconds: sums of integers are the same on ranks that have
    other objects for equal tilings.

    Args:
        cost: Rates of links.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._near: Counter[int] = Counter()  # by holder, to owners on its node
        self._far: Counter[int] = Counter()

    def add(self, holder: int, near: int, far: int) -> None:
        """Add what a holder sends to owners on its node, and to others."""
        self._near[holder] += near
        self._far[holder] += far

    def add_tilings(self, tilings: Iterable[Tiling]) -> None:
        """Add what all holders send of matrices."""
        node = self._cost.node
        for held, num_shares, owners in tilings:
            on_node: Counter[int] = Counter()
            for owner, number in owners.items():
                on_node[node(owner)] += number
            total = owners.total()
            for holder, elements in held.items():
                share, in_node = elements // num_shares, on_node[node(holder)]
                self.add(holder, share * (in_node - owners[holder]), share * (total - in_node))

    def one_byte_seconds(self) -> dict[int, float]:
        """Return the seconds in which each holder sends one byte of every element."""
        gbps, gbps_between = self._cost.gbps, self._cost.gbps_between_nodes
        return {
            holder: (near / gbps + self._far[holder] / gbps_between) * 1e-9
            for holder, near in self._near.items()
        }
