# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The norm of a stack whose rows were sent in fp32."""

import functools
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@functools.cache
def least_norm() -> float:
    """Return emerging-optimizers' lower bound of norms: 1e-7 in 0.3.0, 1e-15 in 0.4.0."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    return float(inspect.signature(muon_utils.newton_schulz).parameters["eps"].default)


def normalize(
    stack: "torch.Tensor", parts_group: "dist.ProcessGroup | None" = None
) -> "torch.Tensor":
    """Divide matrices by their Frobenius norms, as emerging-optimizers does.

    Args:
        stack: ``(num_matrices, rows, cols)``, float32.
        parts_group: Ranks that hold the parts of the matrices; None if they are whole.

    Communication: with ``parts_group`` one all-reduce of a number per matrix.
    """
    import torch
    import torch.distributed as dist

    squares = stack.square().sum((-2, -1), keepdim=True)
    if parts_group is not None:
        dist.all_reduce(squares, group=parts_group)
    return stack / torch.sqrt_(squares).clamp_min_(least_norm())
