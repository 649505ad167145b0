# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""NAMO: one second moment per block, of the norm of its gradient."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.mcore.adaptive.block_muon import FSDPBlockMuon
from megatron_muon.mcore.adaptive.equal_blocks import BlockMoments, ByBlock
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
    Memory: the state and 8 bytes per block; while a step runs, up to 36 bytes per block, and two
        float32 copies of interleaved query, key and value, 2**24 elements or one parameter.
    """

    _squares: list[torch.Tensor]  # by equal blocks, of gradient and momentum, (num_blocks, 2)

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

    def _moments_of(self, param: Any) -> Iterator[BlockMoments]:
        key, num_blocks = self._shared_key("moment2_buffer", param), len(self._blocks[param])
        return (BlockMoments(key, num_blocks, [number]) for number in range(num_blocks))

    def begin(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Sum the squares of gradients, which the momentum may overwrite."""
        self._gradients = self._norms({param: local_tensor(param.grad) for param in self._held})

    def advanced(self, momentum: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        """Sum the squares of what is orthogonalized."""
        both = zip(
            self._gradients,
            self._norms(dict(zip(self._step_params, rows, strict=True))),
            strict=True,
        )
        self._squares = [torch.stack(each, dim=1).square_() for each in both]

    def _norms(self, rows: Mapping[Any, torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms of this rank's rows of equal blocks, ``(num_blocks,)`` float64."""
        by_block: dict[Any, dict[int, torch.Tensor]] = {}
        for interleaved in self._interleaved:
            # The norm of the norms of rows, which are put in the order of blocks at less cost.
            params = interleaved.params
            stack = torch.stack([rows[param] for param in params])
            of_rows = torch.linalg.vector_norm(stack, dim=2, dtype=torch.float64)
            of_rows = of_rows.mT.index_select(0, interleaved.order)
            parts = [part.unbind(1) for part in self._by_block(params[0], of_rows).values()]
            for param, *of_blocks in zip(params, *parts, strict=True):
                by_block[param] = dict(zip(self._held[param], of_blocks, strict=True))
        for param in self._held:
            if param not in by_block:
                by_block[param] = self._by_block(param, rows[param])
        return [equal.norms(by_block) for equal in self._equal_blocks]

    def _normalize(self, rows: ByBlock) -> None:
        of_all = add_up(self._squares, [equal.like.groups for equal in self._equal_blocks])
        for equal, squares in zip(self._equal_blocks, of_all, strict=True):
            group = self.group_of(equal.param)
            gradient, momentum = squares.sqrt().float().unbind(1)
            moments = equal.average(self.state, gradient.square(), 1 - group["beta2"])
            if equal.held:
                factors = momentum / (moments.sqrt() + group["eps"])
                self._scale_results(equal, rows, factors.index_select(0, equal.positions))
