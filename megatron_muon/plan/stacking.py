# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which parts are orthogonalized in one call, and how large their stacks are."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.routes import parts_of
from megatron_muon.plan.wire import Wire

# A stack that is padded by more costs more than the call that it saves.
MAX_PADDING = 1.25


@dataclass(frozen=True)
class Stacking:
    """What may be stacked of some matrices, and how large stacks are.

    Args:
        matrices: Layouts.
        owners: Owners of each.
        cost: Sizes of stacks.
        wire: What travels.
    """

    matrices: Sequence[MatrixLayout]
    owners: Sequence[tuple[int, ...]]
    cost: CostModel
    wire: Wire

    def is_stackable(self, index: int) -> bool:
        """Return whether blocks of a matrix may be orthogonalized in one call with others."""
        return (
            # Rows in fp32 are orthogonalized by upstream's function, which takes one matrix.
            self.wire.normalizes
            # The all-reduces of a split block are between its owners: batching it with another
            # block would need the same owners, in the same stack, on all of them.
            and len(self.owners[index]) == 1
            # A product of a stack may have other last bits than that of one matrix.
            and not self.matrices[index].has_copies
        )

    def rooms(self, num_matrices: int, shape: tuple[int, int], *, is_stacked: bool) -> list[int]:
        """Return the sizes of the stacks of so many blocks of a shape."""
        return stack_rooms(num_matrices, self.cost.stack_size(*shape) if is_stacked else 1)

    def elements(self, indices: Iterable[int]) -> dict[int, list[int]]:
        """Return the elements of the stacks of some matrices, padding included, by owner.

        They are counted for all ranks at once: a report of 2,048 ranks has no time for a plan of
        each.
        """
        counts: Counter[tuple[int, tuple[int, int], bool]] = Counter()
        for index in indices:
            owners = self.owners[index]
            for block, block_shape in enumerate(self.matrices[index].blocks):
                for part in parts_of(index, block, block_shape, owners):
                    shape = part.num_rows, part.num_cols
                    counts[part.owner, shape, self.is_stackable(index)] += 1
        elements: dict[int, list[int]] = defaultdict(list)
        for (owner, shape, is_stacked), count in counts.items():
            rooms = self.rooms(count, shape, is_stacked=is_stacked)
            elements[owner] += [room * math.prod(shape) for room in rooms]
        return elements

    def arriving_in_place(self, indices: Iterable[int], *, is_portioned: bool = False) -> set[int]:
        """Return the owners that need no stack beside the messages of a bucket.

        An owner of one part, whose rows arrive in order: what it receives is the stack. It takes
        half of the memory, and nothing is copied.

        Args:
            indices: Matrices of the bucket.
            is_portioned: Whether the bucket is. Then rows of a tall matrix arrive in order, columns
                of a wide one do not.
        """
        num_parts: Counter[int] = Counter()
        in_order: set[int] = set()
        for index in indices:
            owners = self.owners[index]
            num_parts.update(dict.fromkeys(owners, len(self.matrices[index].blocks)))
            matrix = self.matrices[index]
            rows, cols = matrix.blocks[0]
            if matrix.is_in_rank_order and (rows > cols or not is_portioned):
                in_order.update(owners)
        return {owner for owner in in_order if num_parts[owner] == 1}


def stack_rooms(num_matrices: int, largest: int) -> list[int]:
    """Return the sizes of the stacks that hold so many matrices of one shape.

    Sizes are powers of two up to the largest, so that few different kernels run. The last stack is
    padded to the next size where that adds at most a quarter to it; otherwise what is left goes
    into smaller stacks.

    Args:
        num_matrices: Matrices on this rank.
        largest: A power of two.
    """
    rooms = []
    left, room = num_matrices, largest
    while left > 0:
        if room <= left or room <= left * MAX_PADDING:
            rooms.append(room)
            left -= room
        else:
            room //= 2
    return rooms
