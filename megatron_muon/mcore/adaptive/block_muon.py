# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon with per-block normalization: base class of NorMuon and NAMO."""

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
    """Collect results in the memory of gradients, normalize them by block, then apply them.

    A block is a matrix that Newton-Schulz orthogonalizes by itself. It is normalized and scaled as
    emerging-optimizers does with a parameter of its shape. A rank normalizes its own rows, and
    needs only a few sums over all ranks, which are reduced when all results have arrived.

    It cannot be used with ``all_gather``, where upstream's code has already scaled the results.
    """

    scales_results = False  # after they have been normalized

    @functools.cached_property
    def _blocks(self) -> dict[Any, list[HeldBlock]]:
        return {param: held_blocks(self.owned(param), self.device) for param in self.params}

    @functools.cached_property
    def _sum_of_squares(self) -> SumOfSquares:
        return SumOfSquares(self.device)

    def _shared_key(self, name: str, param: Any) -> str:
        """Return the name of a state that is replicated on all ranks that hold a block.

        Tensor-parallel ranks that orthogonalize their own blocks use different names, as a
        checkpoint keeps one tensor per name.
        """
        tensor_group = self._tensor_group(param)
        is_joined = self.owned(param).tensor_group is not None
        if is_joined or not self._is_tensor_sharded(param):
            return name
        rank, size = dist.get_rank(tensor_group), dist.get_world_size(tensor_group)
        return f"{name}_tensor_rank_{rank}_of_{size}"

    def _rows(self, param: Any) -> torch.Tensor:
        """Return the memory of a parameter's gradient, ``(local_rows, cols)``."""
        # Only empty shards have no gradient.
        return local_tensor(param if param.grad is None else param.grad)

    def _all_blocks(self) -> Iterator[tuple[Any, HeldBlock, torch.Tensor]]:
        """Yield parameter, block, and the parameter's local rows of results for all blocks."""
        for param, blocks in self._blocks.items():
            rows = self._rows(param)
            for block in blocks:
                yield param, block, rows

    def _scaled(self, block: HeldBlock, rows: torch.Tensor) -> torch.Tensor:
        factor, extra = self.scale(*block.shape)
        return rows * factor * extra

    def apply(self, params: Sequence[Any]) -> None:
        """Leave results in place until all have arrived."""

    def finish(self) -> None:
        """Normalize and apply the results of all parameters."""
        self._normalize()
        super().apply(self.params)

    @abstractmethod
    def _normalize(self) -> None:
        """Normalize and scale the results of all blocks, in the memory of gradients."""
