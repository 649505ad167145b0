# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The Gram form with quack's kernels for symmetric products.

All products of the Gram form but those that multiply X are symmetric: the kernels compute one half
of the result and store it twice. They are those of Dao-AILab's gram-newton-schulz, in the package
quack-kernels (the extra ``kernels`` of this package). Not measured here: it needs a GPU.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.backend import Work
from megatron_muon.newton_schulz.gram import Gram, num_square_products
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

if TYPE_CHECKING:
    import torch

# Side of the tile of the kernels; below it their authors use plain products. Source:
# gram-newton-schulz 0.1.6, SYMMETRIC_KERNEL_TILE_SIZE.
_TILE = 256
# Loads of the kernels are of 16 bytes.
_MULTIPLE = 8
# Major compute capability of Hopper and Blackwell, for which the kernels are written.
_CAPABILITIES = (9, 10)


class GramSymmetric(Gram):
    """The Gram form, whose symmetric products are computed by half: all but Q X."""

    name = "gram_symmetric"
    reference = Gram.name
    takes_portions = False  # its kernels have not been run on portions

    def work(self, n: int, m: int, segments: Sequence[int], num_parts: int = 1) -> Work:
        """Count 3 m n^2 operations a segment, and n^3 for each product of n x n matrices.

        Splitting divides m alone.
        """
        num_square = num_square_products(segments)
        flops = 3 * m / num_parts * n * n * len(segments) + n**3 * num_square
        return Work(flops, 2 * len(segments) + num_square, len(segments))

    def takes(self, n: int, m: int, num_parts: int = 1) -> bool:
        """Return whether sides of a part are multiples of 8, the shorter one a tile or more."""
        return n >= _TILE and n % _MULTIPLE == 0 and m % (_MULTIPLE * num_parts) == 0

    def problems(self, settings: NewtonSchulzSettings, device: "torch.device") -> list[str]:
        """List what a job lacks for it: Hopper or Blackwell, quack, bf16."""
        import torch

        found = []
        if not settings.is_bf16:
            found.append("expected fp32_matmul_prec medium: the kernels multiply 16 bits")
        try:
            from quack.gemm_interface import gemm_symmetric  # noqa: F401
        # Its compiler is a package apart, and fails in ways of its own.
        except Exception as error:
            found.append(
                f"expected the package quack-kernels, got {type(error).__name__}: {error}. Run pip "
                "install quack-kernels"
            )
        if device.type != "cuda":
            found.append(f"expected a GPU, got {device.type} ranks")
        elif torch.cuda.get_device_capability(device)[0] not in _CAPABILITIES:
            found.append(
                "expected a GPU of compute capability 9 or 10 (Hopper, Blackwell), got "
                f"{torch.cuda.get_device_capability(device)}"
            )
        return found

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
