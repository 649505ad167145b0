# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The Gram form with quack's kernels for symmetric products.

All products of the Gram form but Q X are symmetric: the kernels compute one half of the result, and
store it twice. They are those of Dao-AILab's gram-newton-schulz, in the package quack-kernels (the
extra ``kernels`` of this package). Not measured here.
"""

from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import gpu_problems
from megatron_muon.newton_schulz.gram import Gram
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

if TYPE_CHECKING:
    import torch

# Tile size of the kernels; for smaller matrices their authors use plain products. Source:
# gram-newton-schulz 0.1.6, SYMMETRIC_KERNEL_TILE_SIZE.
_TILE = 256
# Loads of the kernels are of 16 bytes.
_MULTIPLE = 8
# Major compute capability of Hopper and Blackwell, for which the kernels are written.
_CAPABILITIES = ((9,), (10,))


class GramSymmetric(Gram):
    """The Gram form; of symmetric products one half is computed."""

    name = "gram_symmetric"
    reference = Gram.name
    flops_of_products = (3, 1)

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether sides of a part are multiples of 8, the shorter one at least a tile."""
        return n >= _TILE and n % _MULTIPLE == 0 and m % (_MULTIPLE * num_parts) == 0

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """Check for Hopper or Blackwell, quack, and bf16."""
        found = []
        if not settings.is_bf16:
            found.append("expected fp32_matmul_prec medium: the kernels multiply 16 bits")
        try:
            from quack.gemm_interface import gemm_symmetric  # noqa: F401
        # Its compiler is another package, and fails with various errors.
        except Exception as error:
            found.append(
                f"expected the package quack-kernels, got {type(error).__name__}: {error}. Run pip "
                "install quack-kernels"
            )
        return found + gpu_problems(device, _CAPABILITIES)

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
