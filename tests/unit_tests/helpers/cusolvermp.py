# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Transformer Engine's Newton-Schulz on several ranks, for CPU ranks."""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# What was created, called and destroyed, in this order.
calls: list[str] = []


class CusolverMpCtx:
    """A context with the signature of Transformer Engine 2.19, transformer_engine.pytorch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        calls.append("create")
        # It is a collective there, too.
        dist.barrier(group=group)
        self.nranks = dist.get_world_size(group)
        self.group = group

    def destroy(self) -> None:
        """Note whether the group still is there."""
        dist.barrier(group=self.group)
        calls.append("destroy")


def newton_schulz(
    x: torch.Tensor, ctx: CusolverMpCtx, num_iterations: int = 5, coefficients: Any = None
) -> None:
    """Orthogonalize the columns of a matrix in place: requirements and layout are theirs.

    The library has no promise for a matrix of zeros: here it returns NaN.
    """
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    calls.append("newton_schulz")
    assert len(coefficients) == num_iterations and all(len(each) == 3 for each in coefficients)
    assert x.dim() == 2 and x.dtype in (torch.float32, torch.bfloat16) and x.is_contiguous()
    result = x
    for a, b, c in coefficients:
        result = muon_utils.newton_schulz_step(result, a, b, c, tp_group=ctx.group)
    norm = x.float().square().sum()
    dist.all_reduce(norm, group=ctx.group)
    x.copy_(result * (norm / norm).to(result.dtype))


def install() -> None:
    """Put the stand-in where Transformer Engine is looked for."""
    package = ModuleType("transformer_engine")
    package.__version__ = "2.19.0"  # type: ignore[attr-defined]
    module = ModuleType("transformer_engine.pytorch.newton_schulz")
    module.CusolverMpCtx = CusolverMpCtx  # type: ignore[attr-defined]
    module.newton_schulz = newton_schulz  # type: ignore[attr-defined]
    sys.modules["transformer_engine"] = package
    sys.modules["transformer_engine.pytorch"] = ModuleType("transformer_engine.pytorch")
    sys.modules[module.__name__] = module
