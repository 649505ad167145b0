# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What one matrix of which rows travel takes: seconds on its owners, memory on its holders."""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.assignment import matrix_seconds
from megatron_muon.plan.cost import CostModel, HeldElements
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.portions import MULTIPLE
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.wire import Wire


class NearAndFar(NamedTuple):
    """Elements that a holder sends.

    Args:
        near: To owners on its node.
        far: To owners on other nodes.
    """

    near: int = 0
    far: int = 0


@dataclass(frozen=True)
class TravellingMatrix:
    """A matrix of which rows travel.

    Args:
        index: Index in the plan.
        layout: Its layout.
        owners: Its owners.
        load_s: Newton-Schulz seconds on each owner.
        gather_s: Seconds of its rows over the link of each owner.
        scatter_s: Seconds of its results over the link of each owner.
        edge_s: Seconds of the first product of Newton-Schulz on each owner, and of the last one;
            0 where it cannot be portioned.
        sum_s: Seconds that each of its portions adds to the first product.
        sent: Elements that each holder sends to owners on its node and on others; None where each
            sends what it holds and does not own.
        spread_s: Seconds in which replicas pass its results on, by the holders of a region.
    """

    index: int
    layout: MatrixLayout
    owners: tuple[int, ...]
    load_s: float
    gather_s: Mapping[int, float]
    scatter_s: Mapping[int, float]
    edge_s: float
    sum_s: float
    sent: Mapping[int, NearAndFar] | None
    spread_s: Mapping[tuple[int, ...], float]

    @classmethod
    def of(
        cls, index: int, layout: MatrixLayout, owners: tuple[int, ...], cost: CostModel, wire: Wire
    ) -> "TravellingMatrix":
        """Work out what a matrix costs its owners."""
        load_s = matrix_seconds(layout, cost, len(owners))
        # Copies travel as one, see :meth:`ExchangePlan.num_portions`.
        blocks = () if layout.has_copies else layout.blocks
        edge_s = sum(cost.edge_seconds(*shape, len(owners)) for shape in blocks)
        sum_s = sum(cost.portion_seconds(*shape, len(owners)) for shape in blocks)
        # Every owner has an equal part of each holder's rows, or nearly.
        elements = HeldElements(layout.elements_by_rank, layout.num_elements, cost)
        one_byte_s = {owner: elements.one_byte_seconds(owner) / len(owners) for owner in owners}
        sent: dict[int, NearAndFar] | None = None
        spread: Counter[tuple[int, ...]] = Counter()  # elements by holders
        if elements.has_replicas:
            # The nearest replica sends, and gets results.
            one_byte_s, sent = dict.fromkeys(owners, 0.0), {}
            for moved in transfers_of(index, layout, owners, cost):
                owner, source = moved.owner, moved.source
                if source != owner:
                    one_byte_s[owner] += moved.num_elements * cost.seconds_per_byte(source, owner)
                    near, far = sent.get(source, NearAndFar())
                    if cost.node(source) == cost.node(owner):
                        near += moved.num_elements
                    else:
                        far += moved.num_elements
                    sent[source] = NearAndFar(near, far)
            for region in layout.regions:
                spread[region.holders] += region.num_rows * region.num_cols
        return cls(
            index,
            layout,
            owners,
            load_s,
            {owner: wire.gather_bytes * seconds for owner, seconds in one_byte_s.items()},
            {owner: wire.scatter_bytes * seconds for owner, seconds in one_byte_s.items()},
            edge_s,
            sum_s,
            sent,
            {
                holders: cost.all_gather_seconds(holders, num_elements * wire.scatter_bytes)
                for holders, num_elements in spread.items()
            },
        )

    @property
    def lie(self) -> Hashable:
        """What is equal of matrices of which the same ranks hold the same rows."""
        regions = self.layout.regions
        return self.layout.blocks, regions[0].holders, regions[-1].holders

    @property
    def part_elements(self) -> int:
        """Elements that each owner orthogonalizes."""
        return -(-self.layout.num_elements // len(self.owners))

    def sizes(self, rank: int) -> tuple[int, int, int, int]:
        """Return elements that a rank sends and receives in the gather, and in all scatters."""
        held = self.layout.elements_by_rank.get(rank, 0)
        part = self.part_elements if rank in self.owners else 0
        kept = held // len(self.owners) if part else 0
        if self.sent is None:
            return held - kept, part - kept, part - kept, held - kept
        # With replicas, results come back with all others, also to an owner that holds the rows.
        return sum(self.sent.get(rank, ())), max(0, part - kept), part, held

    def portion_excess(self, rank: int) -> tuple[int, int]:
        """Return what one portion of results may have beyond an equal share, sent and received.

        Copies of a matrix travel in the first portion. Of others, portions are rounded to some
        lines, and so is what a shard has of each.
        """
        *_, sent, received = self.sizes(rank)
        if self.layout.has_copies:
            return sent, received
        rounding = sum(2 * MULTIPLE * min(shape) for shape in self.layout.blocks)
        return min(sent, rounding), min(received, rounding)
