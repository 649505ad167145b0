# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""NorMuon: a second moment per row of the orthogonalized momentum, or per column."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.mcore.adaptive.block_muon import FSDPBlockMuon
from megatron_muon.mcore.adaptive.held_blocks import HeldBlock, add_up
from megatron_muon.runtime.dtensor_layout import local_tensor


class FSDPNorMuon(FSDPBlockMuon):
    """Step every block as emerging-optimizers' ``AdaptiveMuon`` with ``normuon``.

    The moment of a row is the mean of its squares, averaged over steps. A block with more columns
    than rows has moments of columns instead. The result is divided by the root of the moment,
    scaled back to the norm that it had, and scaled as Muon scales.

    Method: NorMuon (https://arxiv.org/abs/2510.05491). Source of the formula: emerging-optimizers
    0.3.0, ``AdaptiveMuon``. Means and norms are summed in float64, so that they do not depend on
    the shards.

    State: ``moment2_rows``, a column sharded like the parameter's rows, if the parameter has long
    or square blocks; ``moment2_cols``, ``(blocks, cols)``, on every rank, if it has wide ones.

    Communication: at the end of a step one all-reduce of 8 bytes per column of wide blocks, and one
        of 16 bytes per block, over the ranks that hold a block. If tensor-parallel ranks join
        columns, also 8 bytes per row of long blocks, over these ranks.
    Memory: the state; at the end of a step 8 bytes per element of it, and three copies of the rows
        of one block.
    """

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for param in group["params"]:
            state, blocks = self.state[param], self._blocks[param]
            # Of q, k and v some may be wide and others long: a parameter can have both states. They
            # are made on ranks with empty shards too, as momentum is: a save needs equal keys.
            wide = [block for block in blocks if not _is_long(block)]
            if len(wide) < len(blocks) and "moment2_rows" not in state:
                state["moment2_rows"] = _rows_like(param, is_joined=blocks[0].has_tensor_cols)
            key = self._shared_key("moment2_cols", param)
            # A column crosses all shards, so its moment has no place in one of them: every rank
            # keeps all of them, and computes them from sums that are equal on all ranks.
            if wide and key not in state:
                state[key] = local_tensor(param).new_zeros(len(wide), wide[0].shape[1])

    def _normalize(self) -> None:
        blocks = list(self._all_blocks())
        # Two all-reduces, not one: the norm of the update is known only once the moments are, which
        # need the means of columns first.
        means = add_up(
            [_squares(block, block.take(rows)) for _, block, rows in blocks],
            [_mean_groups(block) for _, block, _ in blocks],
        )
        moments = self._moments()
        norms = []
        for (param, block, rows), mean, moment in zip(blocks, means, moments, strict=True):
            group = self._group_of[param]
            # A row of a long block has as many elements as the block has columns, the shorter side;
            # a column of a wide one has as many as rows, the shorter side again.
            new = moment.value.lerp_((mean / min(block.shape)).float(), 1 - group["beta2"])
            moment.keep(new)
            step_size = new.clamp_min(group["eps"]).rsqrt_()
            before = block.take(rows)
            update = before * _beside(block, step_size, before.shape[1])
            # Before the rows are overwritten: ``before`` may be a view of them.
            norms.append(self._sum_of_squares([before, update]))
            block.put(rows, update)
        norms = add_up(norms, [block.groups for _, block, _ in blocks])
        for (param, block, rows), squares in zip(blocks, norms, strict=True):
            norm_before, norm_after = squares.sqrt().float()
            ratio = norm_before / norm_after.clamp_min(self._group_of[param]["eps"])
            block.put(rows, self._scaled(block, block.take(rows) * ratio))

    def _moments(self) -> list["_Moment"]:
        """Return the second moments of this rank, in the order of blocks."""
        found = []
        for param, blocks in self._blocks.items():
            state, number = self.state[param], 0
            for block in blocks:
                if _is_long(block):
                    rows = local_tensor(state["moment2_rows"])[:, 0]
                    found.append(_Moment(block.take(rows), rows, block))
                else:
                    cols = state[self._shared_key("moment2_cols", param)][number]
                    found.append(_Moment(cols, cols, None))
                    number += 1
        return found


class _Moment(NamedTuple):
    """The second moment of a block.

    Args:
        value: Of the rows of this rank, or of all columns, ``(count,)`` float32.
        state: What it is part of.
        block: Whose rows they are; None where ``value`` is the state itself.
    """

    value: torch.Tensor
    state: torch.Tensor
    block: HeldBlock | None

    def keep(self, value: torch.Tensor) -> None:
        """Write the value back if it is a copy."""
        # A view has been written already.
        if self.block is not None:
            self.block.put(self.state, value)


def _is_long(block: HeldBlock) -> bool:
    """Return whether rows have moments, not columns."""
    return block.shape[0] >= block.shape[1]


def _mean_groups(block: HeldBlock) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a row or a column with a moment is spread."""
    if not _is_long(block):
        return block.groups
    # Shards cut rows, never columns: of a row only tensor-parallel ranks hold parts.
    return block.tensor_groups if block.has_tensor_cols else ()


def _squares(block: HeldBlock, rows: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares that this rank has, of its rows or of all columns, float64."""
    # float64: the sum of a column then rounds the same however rows are sharded.
    squares = rows.square()
    if _is_long(block):
        return squares.sum(dim=1, dtype=torch.float64)
    # Of all columns, also of other tensor-parallel ranks': all add to one vector.
    sums = squares.new_zeros(block.shape[1], dtype=torch.float64)
    sums[block.first_col : block.first_col + rows.shape[1]] = squares.sum(
        dim=0, dtype=torch.float64
    )
    return sums


def _beside(block: HeldBlock, step_size: torch.Tensor, num_cols: int) -> torch.Tensor:
    """View step sizes so that they multiply the rows of this rank."""
    if _is_long(block):
        return step_size[:, None]
    return step_size[block.first_col : block.first_col + num_cols]


def _rows_like(param: Any, *, is_joined: bool) -> DTensor:
    """Make zeros of one column, sharded as the rows of a parameter are.

    Args:
        param: DTensor parameter.
        is_joined: Whether tensor-parallel ranks that shard columns hold one block together. They
            have the same moments then; otherwise they have different ones, side by side.
    """
    placements = [
        Replicate() if is_joined and placement.is_shard(1) else placement
        for placement in param.placements
    ]
    # Ranks that shard columns, and have blocks of their own, add one column of moments per rank.
    num_cols = 1
    for axis, placement in enumerate(placements):
        if placement.is_shard(1):
            num_cols *= param.device_mesh.size(axis)
    # Without a check: it would be a collective per parameter, and compares what the model's
    # own DTensor has been compared for.
    return DTensor.from_local(
        local_tensor(param).new_zeros(local_tensor(param).shape[0], 1),
        param.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size((param.shape[0], num_cols)),
        stride=(num_cols, 1),
    )
