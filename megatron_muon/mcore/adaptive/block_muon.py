# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon with per-block normalization: base class of NorMuon and NAMO."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.mcore.adaptive.equal_blocks import (
    BlockMoments,
    ByBlock,
    EqualBlocks,
    InterleavedRows,
    Member,
    equal_blocks,
    interleaved_rows,
)
from megatron_muon.mcore.adaptive.held_blocks import HeldBlock, held_blocks
from megatron_muon.mcore.adaptive.second_moment import FSDPAdaptiveMuon
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import CHUNK_ELEMENTS, StepHooks


class FSDPBlockMuon(FSDPAdaptiveMuon, StepHooks, ABC):
    """Collect results in the memory of gradients, normalize them by block, then apply them.

    A block is a matrix that Newton-Schulz orthogonalizes by itself. It is normalized and scaled as
    emerging-optimizers does with a parameter of its shape. A rank normalizes its own rows, and
    needs only a few sums over all ranks, which are reduced when all results have arrived.

    A step calls torch once for all blocks of one shape. Blocks without rows on this rank are zeros
    in the sums, and cost nothing else.

    It cannot be used with ``all_gather``, where upstream's code has already scaled the results.
    """

    scales_results = False  # after they have been normalized
    waits = True
    _step_params: list[Any]  # by position of the step

    @functools.cached_property
    def _blocks(self) -> dict[Any, list[HeldBlock]]:
        return {param: held_blocks(self.parts[param], self.planned(param)) for param in self.params}

    @functools.cached_property
    def _held(self) -> dict[Any, list[int]]:
        """Numbers of the blocks with rows on this rank, by parameter, in the order of rows."""
        return {
            param: sorted(held, key=lambda number: blocks[number].rows[0].start)
            for param, blocks in self._blocks.items()
            if (held := [number for number, block in enumerate(blocks) if block.rows])
        }

    @functools.cached_property
    def _interleaved(self) -> list[InterleavedRows]:
        blocks = self._blocks
        held = {p: [blocks[p][number] for number in of_p] for p, of_p in self._held.items()}
        return interleaved_rows(held, self.device)

    @functools.cached_property
    def _equal_blocks(self) -> list[EqualBlocks]:
        groups = {p: number for number, g in enumerate(self.param_groups) for p in g["params"]}
        members = (
            Member(param, number, groups[param], block, moments)
            for param, blocks in self._blocks.items()
            for number, (block, moments) in enumerate(
                zip(blocks, self._moments_of(param), strict=True)
            )
        )
        return equal_blocks(members, self.device)

    @abstractmethod
    def _moments_of(self, param: Any) -> Iterator[BlockMoments]:
        """Yield where the second moments of each block of a parameter are."""

    def _shared_key(self, name: str, param: Any) -> str:
        """Return the name of a state that is replicated on all ranks that hold a block.

        Tensor-parallel ranks that orthogonalize their own blocks use different names, as a
        checkpoint keeps one tensor per name.
        """
        tensor_group = self._tensor_group(param)
        if self.is_joined(param) or not self._is_tensor_sharded(param):
            return name
        rank, size = dist.get_rank(tensor_group), dist.get_world_size(tensor_group)
        return f"{name}_tensor_rank_{rank}_of_{size}"

    def _by_block(self, param: Any, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """Split rows, or numbers of rows, into views by held block; blocks are contiguous."""
        numbers = self._held[param]
        if len(numbers) == 1:
            return {numbers[0]: rows}
        sizes = [self._blocks[param][number].num_rows for number in numbers]
        return dict(zip(numbers, rows.split(sizes), strict=True))

    def _scale_results(self, equal: EqualBlocks, rows: ByBlock, factors: torch.Tensor) -> None:
        """Multiply results by a factor of each held block, ``(num_held,)``, and scale them."""
        held = equal.take(rows)
        torch._foreach_mul_(held, list(factors.unbind()))
        for factor in self.scale(*equal.like.shape):
            torch._foreach_mul_(held, factor)

    def hooks(
        self, optimizers: Sequence[Any], params: Sequence[tuple[Any, Any]]
    ) -> list[StepHooks]:
        """Return all optimizers: a rank without rows of one joins its sums."""
        for muon in optimizers:
            muon._step_params = [param for _, param in params]
        return list(optimizers)

    @functools.cached_property
    def num_bytes(self) -> int:  # type: ignore[override]
        """Return the memory of sums and moments, and of copies of some blocks."""
        states = [each.items() for each in self.state.values()]
        moments = [each for state in states for key, each in state if key.startswith("moment2")]
        sizes = [local_tensor(param).numel() for param in self.params]
        copied = max(min(CHUNK_ELEMENTS, sum(sizes)), *sizes, 0)
        return 36 * sum(local_tensor(each).numel() for each in moments) + 12 * copied

    def finish(self) -> None:
        """Normalize the results of all parameters."""
        # Foreach calls need views: rows of query, key and value are made contiguous meanwhile.
        for interleaved in self._interleaved:
            interleaved.move(interleaved.order)
        self._normalize({p: self._by_block(p, local_tensor(p.grad)) for p in self._held})
        for interleaved in self._interleaved:
            interleaved.move(interleaved.inverse)

    @abstractmethod
    def _normalize(self, rows: ByBlock) -> None:
        """Normalize and scale the results of all blocks in place, ``(rows, cols)`` by block."""
