# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz by the kernels of a GPU, at the sizes of models: bits, and errors of backends."""

import pytest
import torch
from emerging_optimizers.utils import fp32_matmul_precision
from helpers import whole_matrices
from helpers.device import device
from helpers.exact import exact, relative_error, spectra
from helpers.stacks import orthogonalized, settings

pytestmark = pytest.mark.cuda

# Of Llama 3, Qwen3 and DeepSeek-V3, and odd ones.
SHAPES = [
    *((128, 2048), (768, 2048), (2048, 768), (1024, 4096), (1536, 2048), (4096, 4096)),
    *((4096, 14336), (28672, 4096), (130, 67), (1, 16), (16, 1)),
]
# Elements of a stack, so that the largest one is of two matrices.
MAX_ELEMENTS = 2**28
# Of the Frobenius norm: kernels that add in another order, rounded to bf16 in each of 15 products.
# What is not orthogonalized at all is off by about 1.
STACKED = 0.05
# Of the Frobenius norm, on the hardest spectrum: steps in bf16 have 0.15, the Gram form in fp16
# 0.02 (docs/performance.md).
LARGEST_ERRORS = {"standard": 0.25, "gram": 0.05}


def _drawn(count: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator(device()).manual_seed(0)
    return torch.randn(count, *shape, generator=generator, device=device())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_stack_equals_upstream_matrix_by_matrix(shape):
    """Place and neighbours in a stack change no bit of a matrix on a GPU."""
    matrices = _drawn(max(2, min(8, MAX_ELEMENTS // (shape[0] * shape[1]))), shape)
    rows = torch.stack([whole_matrices.normalized_bf16(matrix) for matrix in matrices])
    single = orthogonalized(rows[:1])
    expected = whole_matrices.orthogonalized(matrices[0], "medium", has_float64_norm=True)
    assert torch.equal(single[0].float(), expected)
    with fp32_matmul_precision("highest"):
        fp32 = orthogonalized(matrices[:1], of=settings(is_bf16=False), is_normalized=False)
    expected = whole_matrices.orthogonalized(matrices[0], "highest", has_float64_norm=False)
    assert torch.equal(fp32[0], expected)
    found = orthogonalized(rows)
    difference = relative_error(found[0], single[0])
    print(f"a stack of {len(rows)} differs from single matrices by {difference:.1e}")
    assert difference <= STACKED
    assert torch.equal(orthogonalized(rows.flip(0)).flip(0), found)
    for neighbour in (0.0, torch.nan, 1e30):
        rows[1:] = neighbour
        assert torch.equal(orthogonalized(rows)[0], found[0])


@pytest.mark.parametrize("backend", LARGEST_ERRORS)
def test_backend_is_as_near_to_float64_as_documented(backend):
    """Errors on spectra with small singular values are as documented."""
    for name, matrix in spectra(512, 2048, device()).items():
        x = whole_matrices.normalized_bf16(matrix.float())
        error = relative_error(orthogonalized(x.unsqueeze(0), backend)[0], exact(x))
        print(f"{backend}, {name}: {error:.4f}")
        assert error <= LARGEST_ERRORS[backend], name
