# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon whose results are normalized by what all rows of a block say."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

from megatron_muon.mcore.adaptive.held_blocks import HeldBlock, held_blocks
from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.norms import SumOfSquares


class FSDPBlockMuon(FSDPZeROTensorParallelMuon):
    """Collect raw results in the memory of gradients, normalize them block by block, apply them.

    A block is what Newton-Schulz sees as one matrix. It is normalized and scaled as
    emerging-optimizers does with a parameter of its shape. Each rank has the rows that it holds:
    what is needed of others are a few sums, which are reduced when all results have come.

    Args:
        params: See :class:`FSDPZeROTensorParallelMuon`.
        beta2: Decay rate of the second moment.
        eps: Least value of what is divided by.
        **muon_kwargs: See :class:`FSDPZeROTensorParallelMuon`.

    Raises:
        ValueError: The exchange is ``all_gather``, by which upstream's code scales results.
    """

    _scales_results = False  # after they have been normalized

    def __init__(
        self, params: Any, *, beta2: float = 0.95, eps: float = 1e-8, **muon_kwargs: Any
    ) -> None:
        self._scale_mode = muon_kwargs.get("scale_mode", "spectral")
        self._extra_scale_factor = muon_kwargs.get("extra_scale_factor", 1.0)
        super().__init__(params, **muon_kwargs)
        if self.exchange.mode != "owner":
            raise ValueError(
                f"{type(self).__name__}: expected --muon-fsdp-exchange owner, got "
                f"{self.exchange.mode}, which scales results before they can be normalized."
            )
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)

    @functools.cached_property
    def _blocks(self) -> dict[Any, list[HeldBlock]]:
        return {param: held_blocks(self._owned(param), self._device) for param in self._params}

    @functools.cached_property
    def _sum_of_squares(self) -> SumOfSquares:
        return SumOfSquares(self._device)

    def _shared_key(self, name: str, param: Any) -> str:
        """Return the name of a state that is no shard: every rank of a block has all of it.

        Tensor-parallel ranks that orthogonalize blocks of their own need a name each: of equal ones
        a checkpoint keeps one.
        """
        group = self._tensor_group(param)
        is_joined = self._owned(param).tensor_group is not None
        if is_joined or not self._is_tensor_sharded(param):
            return name
        return f"{name}_tensor_rank_{dist.get_rank(group)}_of_{dist.get_world_size(group)}"

    def _rows(self, param: Any) -> torch.Tensor:
        """Return the memory of a parameter's gradient, ``(local_rows, cols)``."""
        # Without a gradient the shard is empty.
        return local_tensor(param if param.grad is None else param.grad)

    def _all_blocks(self) -> Iterator[tuple[Any, HeldBlock, torch.Tensor]]:
        """Yield each block with its parameter, and that one's local rows of the result."""
        for param, blocks in self._blocks.items():
            rows = self._rows(param)
            for block in blocks:
                yield param, block, rows

    def _scaled(self, block: HeldBlock, rows: torch.Tensor) -> torch.Tensor:
        factor = get_muon_scale_factor(*block.shape, mode=self._scale_mode)
        # One after the other, as emerging-optimizers does: their product has other bits.
        return rows * factor * self._extra_scale_factor

    def _apply(self, params: Sequence[Any]) -> None:
        """Leave results where they are until all have come."""

    def _finish_step(self) -> None:
        self._normalize()
        super()._apply(self._params)

    def _normalize(self) -> None:
        """Normalize and scale the results of all blocks, in the memory of gradients."""
        raise NotImplementedError
