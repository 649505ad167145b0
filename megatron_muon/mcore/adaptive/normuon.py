# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""NorMuon: a second moment per row of the orthogonalized momentum, or per column."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.mcore.adaptive.block_muon import FSDPBlockMuon
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
    Memory: the state; at the end of a step 8 bytes per element of it, and three copies of the rows
        of one block.
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

    def _normalize(self) -> None:
        blocks = list(self._all_blocks())
        # Two all-reduces: the norm of the update needs the moments, which need the means first.
        sums_of_squares = add_up(
            [_squares(block, block.take(rows)) for _, block, rows in blocks],
            [_mean_groups(block) for _, block, _ in blocks],
        )
        norms = []
        for (param, block, rows), sums, (moment, row_moments) in zip(
            blocks, sums_of_squares, self._moments(), strict=True
        ):
            group = self._group_of[param]
            # A row of a tall block and a column of a wide one have as many elements as the shorter
            # side.
            moment.lerp_((sums / min(block.shape)).float(), 1 - group["beta2"])
            if row_moments is not None:
                block.put(row_moments, moment)
            step_size = moment.clamp_min(group["eps"]).rsqrt_()
            before = block.take(rows)
            update = before * _beside(block, step_size, before.shape[1])
            # Before the rows are overwritten, of which ``before`` may be a view.
            norms.append(self._sum_of_squares([before, update]))
            block.put(rows, update)
        norms = add_up(norms, [block.groups for _, block, _ in blocks])
        for (param, block, rows), squares in zip(blocks, norms, strict=True):
            norm_before, norm_after = squares.sqrt().float()
            ratio = norm_before / norm_after.clamp_min(self._group_of[param]["eps"])
            block.put(rows, self._scaled(block, block.take(rows) * ratio))

    def _moments(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the second moments of all blocks, and where to write them back.

        Moments of columns are views of the state, and need not be written. Those of rows,
        ``(rows,)`` float32, may be copies.
        """
        for param, blocks in self._blocks.items():
            state, number = self.state[param], 0
            for block in blocks:
                if _has_row_moments(block):
                    rows = local_tensor(state["moment2_rows"])[:, 0]
                    yield block.take(rows), rows
                else:
                    yield state[self._shared_key("moment2_cols", param)][number], None
                    number += 1


def _has_row_moments(block: HeldBlock) -> bool:
    """Return whether moments are those of rows, not of columns."""
    return block.shape[0] >= block.shape[1]


def _mean_groups(block: HeldBlock) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a row or column with a moment is sharded."""
    if not _has_row_moments(block):
        return block.groups
    # Shards hold whole rows, so only tensor parallelism shards a row.
    return block.tensor_groups if block.has_tensor_cols else ()


def _squares(block: HeldBlock, rows: torch.Tensor) -> torch.Tensor:
    """Return this rank's sums of squares, of its rows or of all columns, float64."""
    # float64, so that the rounding of a column's sum does not depend on the shards.
    squares = rows.square()
    if _has_row_moments(block):
        return squares.sum(dim=1, dtype=torch.float64)
    # Also of the columns of other tensor-parallel ranks, as all add to one vector.
    sums = squares.new_zeros(block.shape[1], dtype=torch.float64)
    sums[block.first_col : block.first_col + rows.shape[1]] = squares.sum(
        dim=0, dtype=torch.float64
    )
    return sums


def _beside(block: HeldBlock, step_size: torch.Tensor, num_cols: int) -> torch.Tensor:
    """Return a view of step sizes that broadcasts to the rows of this rank."""
    if _has_row_moments(block):
        return step_size[:, None]
    return step_size[block.first_col : block.first_col + num_cols]


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
