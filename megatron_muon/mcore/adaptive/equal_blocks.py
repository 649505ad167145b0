# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Blocks that a step treats together, so that it calls torch once for many of them."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_muon.mcore.adaptive.held_blocks import HeldBlock
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import CHUNK_ELEMENTS

# Tensors by parameter, and by the number of a block in it, of the blocks with rows on this rank.
ByBlock = Mapping[Any, Mapping[int, torch.Tensor]]


class BlockMoments(NamedTuple):
    """Where the second moments of a block are in the state of its parameter.

    Args:
        key: Name of the state, a tensor whose first dimension counts moments.
        size: Length of that dimension on this rank, over all blocks.
        indices: Those of the block that this rank has.
    """

    key: str
    size: int
    indices: Sequence[int]


class Member(NamedTuple):
    """A block among those of all parameters.

    Args:
        param: Its parameter.
        number: Position among the blocks of the parameter.
        group: Position of its parameter group.
        block: This rank's rows of it.
        moments: Its second moments.
    """

    param: Any
    number: int
    group: int
    block: HeldBlock
    moments: BlockMoments


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks of one shape and one parameter group, sharded over the same ranks.

    Args:
        like: A block of them, without its rows.
        param: A parameter of that group.
        num_blocks: How many there are, including those without rows on this rank.
        held: Those of which this rank holds rows, as parameter and number of the block in it.
        num_rows: Rows of each held block.
        positions: Which of all blocks these are, ``(num_held,)`` int64.
        key: Name of the state that has their second moments.
        params: Parameters with such moments on this rank.
        sizes: Lengths of these states.
        indices: Moments of the blocks among those of all these states, int64.

    Memory: 8 bytes per held block, and per second moment of a row or of whole columns.
    """

    like: HeldBlock
    param: Any
    num_blocks: int
    held: tuple[tuple[Any, int], ...]
    num_rows: list[int]
    positions: torch.Tensor
    key: str
    params: list[Any]
    sizes: list[int]
    indices: torch.Tensor

    @classmethod
    def of(cls, members: Sequence[Member], device: torch.device) -> "EqualBlocks":
        """Index blocks that are equal but for their rows."""
        held = [position for position, member in enumerate(members) if member.block.num_rows]
        sizes = {m.param: m.moments.size for m in members if m.moments.indices}
        first = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        indices = [first[m.param] + index for m in members for index in m.moments.indices]
        return cls(
            replace(members[0].block, rows=()),
            members[0].param,
            len(members),
            tuple((members[position].param, members[position].number) for position in held),
            [members[position].block.num_rows for position in held],
            torch.tensor(held, dtype=torch.int64, device=device),
            members[0].moments.key,
            list(sizes),
            list(sizes.values()),
            torch.tensor(indices, dtype=torch.int64, device=device),
        )

    def take(self, rows: ByBlock) -> list[torch.Tensor]:
        """Return the tensors of the held blocks."""
        return [rows[param][number] for param, number in self.held]

    def norms(self, rows: ByBlock) -> torch.Tensor:
        """Return Frobenius norms of this rank's rows of all blocks, ``(num_blocks,)`` float64."""
        # Zeros for blocks of other ranks, which add theirs in the all-reduce.
        values = self.positions.new_zeros(self.num_blocks, dtype=torch.float64)
        if self.held:
            of_held = torch._foreach_norm(self.take(rows), 2, dtype=torch.float64)
            values.index_copy_(0, self.positions, torch.stack(of_held))
        return values

    @functools.cached_property
    def batches(self) -> list[tuple[int, ...]]:
        """Positions among held blocks of those of equal local shape, to be copied together."""
        num_cols = len(self.like.cols)
        return list(in_batches(range(len(self.held)), lambda held: (self.num_rows[held], num_cols)))

    def average(
        self, state: Mapping[Any, Mapping[str, torch.Tensor]], values: torch.Tensor, weight: float
    ) -> torch.Tensor:
        """Average values into the second moments of all blocks, and return these.

        Args:
            state: By parameter, tensors by name.
            values: One for each moment, float32.
            weight: Of the values.

        Memory: a copy of the states, and one of these moments.
        """
        # Joined and split again: one call each, where a view a block would be Python for all of
        # them, also for those without rows here.
        states = [local_tensor(state[param][self.key]) for param in self.params]
        joined = torch.cat(states)
        moments = joined.index_select(0, self.indices)
        moments.lerp_(values.view(moments.shape), weight)
        joined.index_copy_(0, self.indices, moments)
        torch.split_with_sizes_copy(joined, self.sizes, out=states)
        return moments


def equal_blocks(members: Iterable[Member], device: torch.device) -> list[EqualBlocks]:
    """Group blocks that are equal but for their rows.

    Args:
        members: Blocks of all parameters, in the same order on all ranks.
        device: Device of the indices.

    Returns:
        In an order that is equal on all ranks, as all-reduces follow it.
    """
    by_kind = defaultdict(list)
    for member in members:
        by_kind[member.group, member.moments.key, replace(member.block, rows=())].append(member)
    return [EqualBlocks.of(equal, device) for equal in by_kind.values()]


@dataclass(frozen=True)
class InterleavedRows:
    """Equal shards whose blocks alternate, as query, key and value do.

    Args:
        params: Their parameters, copied together.
        order: Local rows in the order of blocks, ``(local_rows,)`` int64.
        inverse: The way back.
    """

    params: tuple[Any, ...]
    order: torch.Tensor
    inverse: torch.Tensor

    def move(self, order: torch.Tensor) -> None:
        """Put the rows of results in another order.

        Memory: two copies of the rows.
        """
        rows = [local_tensor(param.grad) for param in self.params]
        torch._foreach_copy_(rows, torch.stack(rows).index_select(1, order).unbind())


def interleaved_rows(
    held: Mapping[Any, Sequence[HeldBlock]], device: torch.device
) -> list[InterleavedRows]:
    """Return the shards with a block of rows that are not contiguous.

    Args:
        held: By parameter, the blocks with rows on this rank, in the order that they shall have.
        device: Device of the indices.
    """

    def kind(param: Any) -> tuple[Any, ...]:
        """Return rows and columns of a shard, and where its blocks are."""
        blocks = held[param]
        num_rows, num_cols = sum(block.num_rows for block in blocks), len(blocks[0].cols)
        return num_rows, num_cols, tuple(block.rows for block in blocks)

    found = []
    several = [param for param in held if any(len(block.rows) > 1 for block in held[param])]
    for params in in_batches(several, kind):
        runs = itertools.chain.from_iterable(block.rows for block in held[params[0]])
        order = torch.tensor([row for run in runs for row in run], device=device)
        found.append(InterleavedRows(params, order, order.argsort()))
    return found


def in_batches[Item](
    items: Iterable[Item], kind: Callable[[Item], tuple[Any, ...]]
) -> Iterator[tuple[Item, ...]]:
    """Yield items of one kind that are copied together, in memory that is bounded.

    Args:
        items: What is copied.
        kind: Rows and columns of an item, and what else must be equal.
    """
    by_kind = defaultdict(list)
    for item in items:
        by_kind[kind(item)].append(item)
    for (num_rows, num_cols, *_), equal in by_kind.items():
        yield from itertools.batched(equal, max(1, CHUNK_ELEMENTS // (num_rows * num_cols)))
