# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Standard steps and the Gram form with kernels that compute half of symmetric products.

The other half is stored by the same kernel. ``symmetric`` uses emerging-optimizers' Triton kernels
for X X^T and its square. ``gram_symmetric`` uses kernels of Dao-AILab's gram-newton-schulz for all
products of the Gram form but Q X; they are in the package quack-kernels (the extra ``kernels`` of
this package), and have run on no GPU here.
"""

import functools
from typing import TYPE_CHECKING, Any

from megatron_muon.newton_schulz.backend import NewtonSchulzArgs, gpu_problems
from megatron_muon.newton_schulz.gram import Gram
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.standard import Standard, normalize

if TYPE_CHECKING:
    import torch

# Loads of all kernels are of 16 bytes, 8 elements.
_ALIGNMENT, _MULTIPLE = 16, 8
# From this side on steps with the kernels are faster than standard ones on an H200: 0.67 of their
# time at 4096 x 4096, 0.84 at 3072 x 8192, 1.05 at 2048 x 8192, 5 at 2048 x 2048 (docs/gpus.md).
_BREAK_EVEN = 3072
# Compute capabilities on which emerging-optimizers uses the kernels. Source: emerging-optimizers
# 0.3.0, Muon.__init__.
_TRITON_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
# Tiles that the kernel is tuned over. From n = 5000 on emerging-optimizers itself only tries the
# second; the first has more tiles, and won at 3072 and 4096 on an H200.
_TILES = ((128, 128, 64), (128, 256, 64))
_GROUP_SIZE, _NUM_WARPS = 8, 8
# Tile size of quack's kernels; for smaller matrices their authors use plain products. Source:
# gram-newton-schulz 0.1.6, SYMMETRIC_KERNEL_TILE_SIZE.
_TILE = 256
# Major compute capability of Hopper and Blackwell, for which the kernels are written.
_QUACK_CAPABILITIES = ((9,), (10,))


class Symmetric(Standard):
    """Three products per step; two of them are symmetric, and half of each is computed."""

    name = "symmetric"
    reference = Standard
    is_batched = False
    flops_of_step = (3, 1)

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether sides of a part are multiples of 8, and the shorter one is long enough."""
        return n >= _BREAK_EVEN and n % _MULTIPLE == 0 and m % (_MULTIPLE * num_parts) == 0

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Check for a GPU that the kernels were tested on, Triton, and bf16."""
        problems = []
        if not settings.is_bf16:
            problems.append("expected fp32_matmul_prec medium: the kernels multiply bf16")
        try:
            from emerging_optimizers import triton_kernels

            if not triton_kernels.HAS_TRITON_340:
                problems.append("expected Triton 3.4 or later, got an older one")
        except (ImportError, AttributeError) as error:
            problems.append(f"expected Triton 3.4 or later, got {error}")
        problems += gpu_problems(device, _TRITON_CAPABILITIES)
        if not problems and (reason := _error_of_triton(device)):
            problems.append(
                f"expected Triton to compile, got {reason}. Install gcc and python3-dev"
            )
        return problems

    def run(self, stack: "torch.Tensor", args: NewtonSchulzArgs) -> "torch.Tensor":
        """Orthogonalize a stack, matrix by matrix; see ``Backend.run()``."""
        import torch
        from emerging_optimizers.orthogonalized_optimizers import muon_utils

        _limit_tuning()
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
    """Compile the kernels for a small matrix, and return what their compiler raises, if anything.

    Runtime images of CUDA lack a C compiler, or Python's header.
    """
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    _limit_tuning()
    try:
        x = torch.zeros(_TILE, _TILE, dtype=torch.bfloat16, device=device)
        muon_utils.newton_schulz_step_tsyrk(x, 1.0, 1.0, 1.0)
    # Compilers raise whatever they do.
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _limit_tuning() -> None:
    """Limit Triton's tuning to six configurations in this process, if the release has them.

    emerging-optimizers leaves 180 for n below 5000: they take minutes to compile for a shape, while
    other ranks wait.
    """
    from emerging_optimizers import triton_kernels

    kernel: Any = getattr(getattr(triton_kernels, "syrk", None), "syrk_kernel_bf16", None)
    configs = [
        config
        for config in getattr(kernel, "configs", ())
        if tuple(config.kwargs.get(f"TILE_{side}") for side in "MNK") in _TILES
        and config.kwargs.get("GROUP_SIZE_M") == _GROUP_SIZE
        and config.num_warps == _NUM_WARPS
    ]
    if configs:
        kernel.configs = configs


class GramSymmetric(Gram):
    """The Gram form; half of every symmetric product is computed."""

    name = "gram_symmetric"
    reference = Gram
    flops_of_products = (3, 1)

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether sides of a part are multiples of 8, the shorter one at least a tile."""
        return n >= _TILE and n % _MULTIPLE == 0 and m % (_MULTIPLE * num_parts) == 0

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Check for Hopper or Blackwell, quack, and bf16."""
        problems = []
        if not settings.is_bf16:
            problems.append("expected fp32_matmul_prec medium: the kernels multiply 16 bits")
        try:
            from quack.gemm_interface import gemm_symmetric  # noqa: F401
        # Its compiler is another package, and fails with various errors.
        except Exception as error:
            problems.append(
                f"expected the package quack-kernels, got {type(error).__name__}: {error}. Run pip "
                "install quack-kernels"
            )
        return problems + gpu_problems(device, _QUACK_CAPABILITIES)

    def _symmetric_product(
        self,
        a: "torch.Tensor",
        b: "torch.Tensor",
        c: "torch.Tensor | None" = None,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> "torch.Tensor":
        """Return ``alpha a b + beta c``, which is symmetric, ``(num_matrices, n, n)``."""
        from quack.gemm_interface import gemm_symmetric

        return gemm_symmetric(a, b, C=c, alpha=alpha, beta=beta)
