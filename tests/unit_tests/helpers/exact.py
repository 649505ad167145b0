# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz in float64, matrices that are hard for it, and products as another dtype rounds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from megatron_muon.newton_schulz.settings import coefficients_of


def exact(x: torch.Tensor, steps: int = 5, coefficient_type: str = "quintic") -> torch.Tensor:
    """Apply the polynomial to the singular values of normalized ``(..., rows, cols)``, float64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    for a, b, c in coefficients_of(steps, coefficient_type):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ v


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of what was expected, float64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def spectra(rows: int, cols: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return wide matrices by name, float64, whose small singular values are rounded most."""
    of = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    u, v = (
        torch.linalg.qr(torch.randn(size, rows, dtype=torch.float64, **of))[0]
        for size in (rows, cols)
    )
    i = torch.arange(1, rows + 1, dtype=torch.float64, device=device)
    num_there = rows // 8
    return {
        "Gaussian": torch.randn(rows, cols, dtype=torch.float64, **of),
        "falling as 1 / i": (u / i) @ v.mT,
        "falling as 1 / i^2": (u / i**2) @ v.mT,
        "log-uniform, 1 to 1e-6": (u * 10 ** (-6 * (i - 1) / (rows - 1))) @ v.mT,
        f"rank {num_there}": (u * (i <= num_there)) @ v.mT,
    }


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Round the results of products to a dtype, their sums in fp32: a GPU's, on fp32 tensors.

    So is what is added in place: the diagonal of Q in the Gram form.
    """

    def rounded(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: function(*args, **kwargs).to(dtype).float()

    add_ = torch.Tensor.add_
    with ExitStack() as stack:
        for owner, name in (
            (torch, "addmm"),
            (torch, "baddbmm"),
            (torch.Tensor, "__matmul__"),
        ):
            stack.enter_context(mock.patch.object(owner, name, rounded(getattr(owner, name))))
        stack.enter_context(
            mock.patch.object(torch.Tensor, "add_", lambda x, y: x.copy_(add_(x, y).to(dtype)))
        )
        yield
