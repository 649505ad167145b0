# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""NorMuon: a second moment per row of the orthogonalized momentum, or per column."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.mcore.adaptive.block_muon import FSDPBlockMuon
from megatron_muon.mcore.adaptive.equal_blocks import BlockMoments, ByBlock, EqualBlocks
from megatron_muon.mcore.adaptive.held_blocks import HeldBlock, add_up
from megatron_muon.runtime.dtensor_layout import local_tensor


class FSDPNorMuon(FSDPBlockMuon):
    """Step as emerging-optimizers' ``AdaptiveMuon`` with ``normuon`` does, per block.

    The moment of a row is the mean of its squares, averaged over steps. A block with more columns
    than rows has moments of its columns instead. The result is divided by their roots, scaled back
    to its former norm, and scaled as in Muon.

    Method: NorMuon (https://arxiv.org/abs/2510.05491). Source of the formula: emerging-optimizers
    0.3.0, ``AdaptiveMuon``. Means and norms are summed in float64, so that they do not depend on
    the shards.

    State: ``moment2_rows``, a column sharded as the parameter's rows, if it has tall or square
    blocks; ``moment2_cols``, ``(blocks, cols)``, on every rank, if it has wide ones.

    Communication: at the end of a step one all-reduce of 8 bytes per column of wide blocks, and one
        of 16 bytes per block, over the ranks that hold a block. If tensor-parallel ranks shard the
        columns of joined blocks, also 8 bytes per row of tall blocks, over these ranks.
    Memory: the state, and 8 bytes per element of ``moment2_rows``; at the end of a step up to 36
        bytes per element of the state, and a copy of some rows in float32 and in float64, 2**24
        elements or one block.
    """

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for param in group["params"]:
            state, blocks = self.state[param], self._blocks[param]
            # Of q, k and v some may be wide and others tall: a parameter can have both states.
            # Ranks with empty shards have them too, as a save needs equal keys on all ranks.
            wide = [block for block in blocks if not _has_row_moments(block)]
            if len(wide) < len(blocks) and "moment2_rows" not in state:
                state["moment2_rows"] = _rows_like(param, is_joined=blocks[0].has_tensor_cols)
            key = self._shared_key("moment2_cols", param)
            # All shards have elements of a column, so its moment is replicated: every rank computes
            # it from sums that are equal on all ranks.
            if wide and key not in state:
                state[key] = local_tensor(param).new_zeros(len(wide), wide[0].shape[1])

    def _moments_of(self, param: Any) -> Iterator[BlockMoments]:
        blocks, wide_numbers = self._blocks[param], itertools.count()
        num_rows = sum(block.num_rows for block in blocks)
        num_wide = sum(not _has_row_moments(block) for block in blocks)
        for block in blocks:
            if _has_row_moments(block):
                rows = [row for run in block.rows for row in run]
                yield BlockMoments("moment2_rows", num_rows, rows)
            else:
                key = self._shared_key("moment2_cols", param)
                yield BlockMoments(key, num_wide, [next(wide_numbers)])

    def _normalize(self, rows: ByBlock) -> None:
        # Two all-reduces: the norm of the update needs the moments, which need the means first.
        sums = add_up(
            [self._sums_of_squares(equal, rows) for equal in self._equal_blocks],
            [_mean_groups(equal.like) for equal in self._equal_blocks],
        )
        squares = add_up(
            [
                self._divide(equal, of_equal, rows)
                for equal, of_equal in zip(self._equal_blocks, sums, strict=True)
            ],
            [equal.like.groups for equal in self._equal_blocks],
        )
        for equal, of_equal in zip(self._equal_blocks, squares, strict=True):
            if equal.held:
                of_held = of_equal.index_select(0, equal.positions)
                before, after = of_held.sqrt_().float().unbind(1)
                ratios = before / after.clamp_min_(self.group_of(equal.param)["eps"])
                self._scale_results(equal, rows, ratios)

    def _sums_of_squares(self, equal: EqualBlocks, rows: ByBlock) -> torch.Tensor:
        """Return this rank's sums of squares, float64.

        Returns:
            Of the rows of held blocks, one after the other, or of the columns of all blocks,
            ``(num_blocks, cols)``.
        """
        has_row_moments = _has_row_moments(equal.like)
        held = equal.take(rows)
        sums: dict[int, torch.Tensor] = {}
        for batch in equal.batches:
            squares = torch.stack([held[position] for position in batch]).square_()
            # float64, so that the rounding of a column's sum does not depend on the shards.
            of_batch = squares.sum(dim=2 if has_row_moments else 1, dtype=torch.float64)
            sums.update(zip(batch, of_batch.unbind(), strict=True))
        of_held = [sums[position] for position in range(len(held))]
        if has_row_moments and held:
            return torch.cat(of_held)
        shape = (0,) if has_row_moments else (equal.num_blocks, equal.like.shape[1])
        of_all = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if held:
            # Zeros in the columns of other tensor-parallel ranks, as all add to one vector.
            own = of_all[:, equal.like.cols.start : equal.like.cols.stop]
            own.index_copy_(0, equal.positions, torch.stack(of_held))
        return of_all

    def _divide(self, equal: EqualBlocks, sums: torch.Tensor, rows: ByBlock) -> torch.Tensor:
        """Advance second moments, and divide results by their roots.

        Args:
            equal: Blocks.
            sums: What :meth:`_sums_of_squares` returns, over all ranks.
            rows: Results.

        Returns:
            This rank's squared norms of results before and after, ``(num_blocks, 2)`` float64.
        """
        before = equal.norms(rows)
        # Moments of columns are averaged on all ranks, also on those that hold nothing.
        if equal.params:
            group = self.group_of(equal.param)
            # A row of a tall block and a column of a wide one have as many elements as the shorter
            # side.
            means = (sums / min(equal.like.shape)).float()
            moments = equal.average(self.state, means, 1 - group["beta2"])
            if equal.held:
                step_sizes = _of_held(equal, moments).clamp_min_(group["eps"]).rsqrt_()
                parts = (
                    step_sizes.split(equal.num_rows)
                    if _has_row_moments(equal.like)
                    else step_sizes.unbind()
                )
                torch._foreach_mul_(equal.take(rows), list(parts))
        return torch.stack([before, equal.norms(rows)], dim=1).square_()


def _has_row_moments(block: HeldBlock) -> bool:
    """Return whether moments are those of rows, not of columns."""
    return block.shape[0] >= block.shape[1]


def _mean_groups(block: HeldBlock) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a row or column with a moment is sharded."""
    if not _has_row_moments(block):
        return block.groups
    # Shards hold whole rows, so only tensor parallelism shards a row.
    return block.tensor_groups if block.has_tensor_cols else ()


def _of_held(equal: EqualBlocks, moments: torch.Tensor) -> torch.Tensor:
    """Return the moments that this rank's rows are divided by, of blocks or of rows."""
    if _has_row_moments(equal.like):
        return moments
    own = moments[:, equal.like.cols.start : equal.like.cols.stop]
    return own.index_select(0, equal.positions)


def _rows_like(param: Any, *, is_joined: bool) -> DTensor:
    """Return zeros of one column, sharded as the rows of a parameter.

    Args:
        param: DTensor parameter.
        is_joined: Whether tensor-parallel ranks that shard columns hold one block together. They
            then replicate the column; otherwise each has its own, as a shard of the columns.
    """
    placements = [
        Replicate() if is_joined and placement.is_shard(1) else placement
        for placement in param.placements
    ]
    num_cols = 1
    for axis, placement in enumerate(placements):
        if placement.is_shard(1):
            num_cols *= param.device_mesh.size(axis)
    # Without a check, a collective per parameter: the model's own DTensor has been checked.
    return DTensor.from_local(
        local_tensor(param).new_zeros(local_tensor(param).shape[0], 1),
        param.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size((param.shape[0], num_cols)),
        stride=(num_cols, 1),
    )
