# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The norm of a stack whose rows travelled in fp32."""

from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.settings import EPSILON

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def normalize(
    stack: "torch.Tensor", parts_group: "dist.ProcessGroup | None" = None
) -> "torch.Tensor":
    """Divide each matrix by its Frobenius norm, as emerging-optimizers does.

    Args:
        stack: ``(num_matrices, rows, cols)``, float32.
        parts_group: Ranks that hold the parts of each matrix; None where matrices are whole.

    Communication: with ``parts_group`` one all-reduce of a number a matrix.
    """
    import torch
    import torch.distributed as dist

    squares = stack.square().sum((-2, -1), keepdim=True)
    if parts_group is not None:
        dist.all_reduce(squares, group=parts_group)
    return stack / torch.sqrt_(squares).clamp_min_(EPSILON)
