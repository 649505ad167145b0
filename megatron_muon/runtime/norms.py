# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums of squares in float64, so that the norm does not depend on where a matrix is cut."""

from collections.abc import Sequence

import torch

# Converted at once on a CPU: fits its cache, and takes few calls.
_CHUNK_ELEMENTS = 2**18


class SumOfSquares:
    """Add up squares in float64.

    fp32 sums would differ in the last bits with the number of shards; float64 sums differ too, but
    by so little that the norm, rounded to fp32, practically never does (docs/numerics.md).

    Args:
        device: Where the tensors live.

    Memory: 2 MB on a CPU, for converting a chunk at a time; a GPU does it in one fused pass.
    """

    def __init__(self, device: torch.device) -> None:
        num_elements = _CHUNK_ELEMENTS if device.type == "cpu" else 0
        self._scratch = torch.empty(num_elements, dtype=torch.float64, device=device)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a float64 scalar for each tensor: ``(rows, cols)``, float32, any strides."""
        if self._scratch.numel() == 0:
            norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64) if tensors else ()
            return [norm.square_() for norm in norms]
        return [self._sum(tensor) for tensor in tensors]

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in tensor.split(max(1, _CHUNK_ELEMENTS // tensor.shape[1])):
            for chunk in rows.split(_CHUNK_ELEMENTS, dim=1):
                flat = self._scratch[: chunk.numel()]
                flat.view(chunk.shape).copy_(chunk)
                total += torch.dot(flat, flat)
        return total
