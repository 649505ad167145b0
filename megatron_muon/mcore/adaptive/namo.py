# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""NAMO: one second moment per block, of the norm of its gradient."""

from typing import Any

import torch

from megatron_muon.mcore.adaptive.block_muon import FSDPBlockMuon
from megatron_muon.mcore.adaptive.held_blocks import add_up
from megatron_muon.runtime.dtensor_layout import local_tensor


class FSDPNamo(FSDPBlockMuon):
    """Step every block as emerging-optimizers' ``AdaptiveMuon`` with ``namo``.

    The result is multiplied by the norm of the orthogonalized momentum, and divided by the root of
    the running mean of the squared norm of the gradient.

    Method: NAMO (https://arxiv.org/abs/2602.17080). Source of the formula: emerging-optimizers
    0.3.0, ``AdaptiveMuon``. Norms are summed in float64, so that they do not depend on the shards.

    State: ``moment2_buffer``, ``(blocks,)``, on every rank.

    Raises:
        ValueError: Weight decay is added to gradients (``l2``), whose norm would then count it.

    Communication: at the end of a step one all-reduce of 16 bytes per block over the ranks that
        hold it.
    """

    _squares: list[torch.Tensor]  # by block, of gradient and momentum, (2,) float64

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        if self.weight_decay_method == "l2":
            raise ValueError(
                "namo: expected use_decoupled_weight_decay, got weight decay in the gradients, "
                "whose norms it averages. Leave use_decoupled_weight_decay True."
            )

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for param in group["params"]:
            key = self._shared_key("moment2_buffer", param)
            if key not in self.state[param]:
                num_blocks = len(self._blocks[param])
                self.state[param][key] = local_tensor(param).new_zeros(num_blocks)

    def advance(self) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
        """Advance the momentum, and sum the squares of gradients and momentum."""
        # Gradients first, as the momentum may overwrite them.
        gradients = self._sum_by_block({param: self._rows(param) for param in self.params})
        rows, results = super().advance()
        self._squares = list(torch.stack([gradients, self._sum_by_block(rows)], dim=1))
        return rows, results

    def _sum_by_block(self, rows: dict[Any, torch.Tensor]) -> torch.Tensor:
        """Return the sums of squares of this rank's rows, by block, float64."""
        return self._sum_of_squares(
            [block.take(rows[param]) for param, blocks in self._blocks.items() for block in blocks]
        )

    def _normalize(self) -> None:
        blocks = list(self._all_blocks())
        norms = iter(add_up(self._squares, [block.groups for _, block, _ in blocks]))
        for param, of_param in self._blocks.items():
            group = self._group_of[param]
            both = torch.stack([next(norms) for _ in of_param]).sqrt().float()
            moments = self.state[param][self._shared_key("moment2_buffer", param)]
            moments.lerp_(both[:, 0].square(), 1 - group["beta2"])
            factors = both[:, 1] / (moments.sqrt() + group["eps"])
            rows = self._rows(param)
            for block, factor in zip(of_param, factors, strict=True):
                block.put(rows, self._scaled(block, block.take(rows) * factor))
