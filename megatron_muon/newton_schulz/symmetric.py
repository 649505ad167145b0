# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Standard steps in which emerging-optimizers' Triton kernel makes the symmetric products.

It computes half of a product, and stores both halves.
"""

import functools
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.standard import Standard, normalize

if TYPE_CHECKING:
    import torch

# The kernel loads 16 bytes, 8 elements.
_ALIGNMENT, _MULTIPLE = 16, 8
# From this side on the kernel has one shape of tiles, and the same bits in every process. For
# smaller ones it is tuned over 180 configurations, which takes minutes. Source: emerging-optimizers
# 0.3.0, prune_invalid_configs.
_LEAST_SIDE = 5000
# Compute capabilities on which emerging-optimizers uses the kernel. Source: emerging-optimizers
# 0.3.0, Muon.__init__.
_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))


class Symmetric(Standard):
    """Three products per step; two of them are symmetric, and half of each is computed."""

    name = "symmetric"
    reference = Standard
    is_batched = False
    flops_of_step = (3, 1)

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether sides of a part are multiples of 8, and the shorter one is long enough."""
        return n >= _LEAST_SIDE and n % _MULTIPLE == 0 and m % (_MULTIPLE * num_parts) == 0

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Check for a GPU that the kernel was tested on, Triton, and bf16."""
        import torch
        from emerging_optimizers import triton_kernels

        problems = []
        if not settings.is_bf16:
            problems.append("expected fp32_matmul_prec medium: the kernel multiplies bf16")
        if not triton_kernels.HAS_TRITON_340:
            problems.append("expected Triton 3.4 or later, got an older one")
        if device.type != "cuda":
            problems.append(f"expected a GPU, got {device.type} ranks")
        elif (actual := torch.cuda.get_device_capability(device)) not in _CAPABILITIES:
            expected = ", ".join(f"{major}.{minor}" for major, minor in _CAPABILITIES)
            problems.append(
                f"expected a GPU of compute capability {expected}, got {actual[0]}.{actual[1]}"
            )
        if not problems and (reason := _error_of_triton(device)):
            problems.append(
                f"expected Triton to compile, got {reason}. Install gcc and python3-dev"
            )
        return problems

    def run(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
        """Orthogonalize a stack, matrix by matrix; see ``Backend.run()``."""
        import torch
        from emerging_optimizers.orthogonalized_optimizers import muon_utils

        x = normalize(stack, args)
        results = []
        # The kernels have no batches.
        for matrix in x.bfloat16():
            # A stack may begin at any element of a buffer, where the kernels cannot load.
            y = matrix.clone() if matrix.data_ptr() % _ALIGNMENT else matrix
            y = y.mT if args.is_tall else y
            for a, b, c in args.settings.coefficients:
                y = muon_utils.newton_schulz_step_tsyrk(y, a, b, c, tp_group=args.parts_group)
            results.append(y.mT if args.is_tall else y)
        result = results[0].unsqueeze(0) if len(results) == 1 else torch.stack(results)
        return result.to(stack.dtype)


@functools.cache
def _error_of_triton(device: "torch.device") -> str:
    """Compile the kernel for a narrow matrix, and return the error of its compiler, if any.

    Runtime images of CUDA lack a C compiler, or Python's header.
    """
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    try:
        x = torch.zeros(_LEAST_SIDE, 64, dtype=torch.bfloat16, device=device)
        muon_utils.newton_schulz_step_tsyrk(x, 1.0, 1.0, 1.0)
    # Compilers raise whatever they do.
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""
