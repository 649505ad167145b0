# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The kernel that moves rows beside torch's own functions."""

import torch

from megatron_muon.runtime.row_moves import RowMoves, Side, Tensors


def difference_from_torch(device: torch.device) -> str | None:
    """Return what differs between the kernel and torch's own functions; None for nothing."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(96, 100, generator=generator) * torch.logspace(-30, 30, 100)
    wide = wide.to(device)
    narrow = wide.bfloat16()
    norms = torch.tensor([3.7, 0.2], device=device)
    factors = ((0.3, 1.7), (0.9, 1.0))
    # Whole rows are moved as one long one, whose full tile takes wide loads; a slice of
    # columns row by row.
    moves = [(1, 0, 0, 0, 2, 0, 0, 0, 48, 100, 0), (1, 48, 3, 0, 2, 48, 3, 0, 48, 50, 1)]
    for source, target, divisors, own in (
        (wide, narrow, norms, None),
        (narrow, wide, None, factors),
        (narrow, narrow, None, None),
        (wide, wide, None, factors),
    ):
        moved = []
        for by_kernel in (True, False):
            moved.append(torch.zeros_like(target))
            tensors = Tensors(source.flatten(), device, by_kernel)
            tensors.bind([source, moved[-1]])
            tensors.update()
            sides = Side(source.dtype), Side(target.dtype)
            RowMoves(moves, *sides, tensors, own).run(divisors)
        if not torch.equal(*moved):
            return f"{source.dtype} to {target.dtype}: other bits than torch's"
    return None
