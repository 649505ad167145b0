# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The rows of blocks that this rank holds, and sums over all ranks that hold a block."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.plan.layout import block_rows
from megatron_muon.rows.parameters import NamedParameter


@dataclass(frozen=True)
class HeldBlock:
    """This rank's rows of a block, which is a matrix that Newton-Schulz orthogonalizes by itself.

    Args:
        shape: Global rows and columns of the block.
        rows: Its rows among the local rows of the parameter, ascending: several ranges if they are
            not contiguous, as those of query, key and value; empty if this rank holds none.
        cols: Its columns that this tensor-parallel rank has.
        shard_groups: Groups over which rows of this tensor-parallel rank are sharded.
        tensor_groups: Tensor-parallel groups that hold one block together.
        has_tensor_cols: Whether those shard its columns, not its rows.
    """

    shape: tuple[int, int]
    rows: tuple[range, ...]
    cols: range
    shard_groups: tuple[dist.ProcessGroup, ...]
    tensor_groups: tuple[dist.ProcessGroup, ...]
    has_tensor_cols: bool

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which the elements of the block are sharded."""
        return (*self.shard_groups, *self.tensor_groups)

    @property
    def num_rows(self) -> int:
        """Rows that this rank holds."""
        return sum(len(run) for run in self.rows)


def held_blocks(part: NamedParameter, planned: NamedParameter) -> list[HeldBlock]:
    """Return all blocks of a parameter, including those without rows on this rank.

    Args:
        part: What its tensor-parallel rank has.
        planned: What Newton-Schulz sees; tensor parallelism is its last axis if they differ.
    """
    mesh, placement = planned.view.device_mesh, planned.view.placements[-1]  # type: ignore[attr-defined]
    is_joined = planned.view is not part.view and placement.is_shard()
    has_tensor_cols = is_joined and placement.dim == 1
    (start, stop), (_, num_cols) = part.own_box
    num_rows = part.view.shape[0]
    # Not that of its box: a rank without rows has none.
    first_col = mesh.get_local_rank(mesh.ndim - 1) * num_cols if has_tensor_cols else 0
    # Sums over one axis after the other are sums over all of them.
    shard_groups = tuple(
        mesh.get_group(axis)
        for axis, each in enumerate(part.view.placements)  # type: ignore[attr-defined]
        if each.is_shard()
    )
    rows_of_tensor_ranks = planned.view.shape[0] // num_rows
    blocks = []
    for ranges in block_rows(num_rows, planned.blocks):
        held = (
            range(max(rows.start, start) - start, min(rows.stop, stop) - start) for rows in ranges
        )
        block_size = sum(rows.stop - rows.start for rows in ranges)
        blocks.append(
            HeldBlock(
                (block_size * rows_of_tensor_ranks, planned.view.shape[1]),
                tuple(run for run in held if run),
                range(first_col, first_col + num_cols),
                shard_groups,
                (mesh.get_group(mesh.ndim - 1),) if is_joined else (),
                has_tensor_cols,
            )
        )
    return blocks


def add_up(
    sums: Sequence[torch.Tensor], groups: Sequence[Sequence[dist.ProcessGroup]]
) -> list[torch.Tensor]:
    """Sum tensors over ranks, those of one group together.

    Args:
        sums: Tensors of one dtype; their number and sizes are equal on all ranks of a group.
        groups: By tensor, the groups to sum over, one after the other.

    Communication: one all-reduce per group.
    """
    sums = list(sums)
    # In the order of parameters, which all ranks share.
    for group in dict.fromkeys(itertools.chain.from_iterable(groups)):
        numbers = [number for number, of_one in enumerate(groups) if group in of_one]
        flat = torch.cat([sums[number].flatten() for number in numbers])
        dist.all_reduce(flat, group=group)
        parts = flat.split([sums[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            sums[number] = part.view(sums[number].shape)
    return sums
