# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums of squares in float64, so that the norm does not depend on where a matrix is cut."""

from collections.abc import Sequence

import torch

# Converted at once on a CPU: stays in its cache.
_CHUNK_ELEMENTS = 2**14


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add up the squares of each tensor in float64.

    fp32 sums would differ in the last bits with the number of shards; float64 sums differ too, but
    by so little that the norm, rounded to fp32, practically never does (docs/numerics.md).

    Args:
        tensors: ``(rows, cols)`` each, float32, any strides.

    Returns:
        A float64 scalar for each.

    Memory: none to speak of; a GPU does it in one fused pass.
    """
    if not tensors or tensors[0].device.type != "cpu":
        return [norm.square() for norm in _foreach_norm(tensors)]
    scratch = torch.empty(_CHUNK_ELEMENTS, dtype=torch.float64)
    sums = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.float64)
        for row in tensor.split(max(1, _CHUNK_ELEMENTS // tensor.shape[1])):
            for chunk in row.split(_CHUNK_ELEMENTS, dim=1):
                flat = scratch[: chunk.numel()]
                flat.view(chunk.shape).copy_(chunk)
                total += torch.dot(flat, flat)
        sums.append(total)
    return sums


def _foreach_norm(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_norm(list(tensors), 2, dtype=torch.float64) if tensors else ()
