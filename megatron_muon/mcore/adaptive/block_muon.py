# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon whose results are normalized by what all rows of a block say."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.mcore.adaptive.held_blocks import HeldBlock, held_blocks
from megatron_muon.mcore.adaptive.second_moment import FSDPAdaptiveMuon
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.norms import SumOfSquares


class FSDPBlockMuon(FSDPAdaptiveMuon, ABC):
    """Collect raw results in the memory of gradients, normalize them block by block, apply them.

    A block is what Newton-Schulz sees as one matrix. It is normalized and scaled as
    emerging-optimizers does with a parameter of its shape. Each rank has the rows that it holds:
    what is needed of others are a few sums, which are reduced when all results have come.

    Args:
        params: See :class:`FSDPZeROTensorParallelMuon`.
        **kwargs: See :class:`FSDPAdaptiveMuon`.

    Raises:
        ValueError: The exchange is ``all_gather``, by which upstream's code scales results.
    """

    _scales_results = False  # after they have been normalized

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        if self.exchange.mode != "owner":
            raise ValueError(
                f"{type(self).__name__}: expected --muon-fsdp-exchange owner, got "
                f"{self.exchange.mode}, which scales results before they can be normalized. Leave "
                "it out, or use --adaptive-muon-moment2-method adamuon."
            )

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
        tensor_group = self._tensor_group(param)
        is_joined = self._owned(param).tensor_group is not None
        if is_joined or not self._is_tensor_sharded(param):
            return name
        rank, size = dist.get_rank(tensor_group), dist.get_world_size(tensor_group)
        return f"{name}_tensor_rank_{rank}_of_{size}"

    def _rows(self, param: Any) -> torch.Tensor:
        """Return the memory of a parameter's gradient, ``(local_rows, cols)``."""
        # Without a gradient the shard is empty.
        return local_tensor(param if param.grad is None else param.grad)

    def _all_blocks(self) -> Iterator[tuple[Any, HeldBlock, torch.Tensor]]:
        """Yield each block: its parameter, the block, and the parameter's local rows of results."""
        for param, blocks in self._blocks.items():
            rows = self._rows(param)
            for block in blocks:
                yield param, block, rows

    def _scaled(self, block: HeldBlock, rows: torch.Tensor) -> torch.Tensor:
        factor, extra = self._factors(*block.shape)
        return rows * factor * extra

    def _apply(self, params: Sequence[Any]) -> None:
        """Leave results where they are until all have come."""

    def _finish_step(self) -> None:
        self._normalize()
        super()._apply(self._params)

    @abstractmethod
    def _normalize(self) -> None:
        """Normalize and scale the results of all blocks, in the memory of gradients."""
