# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums of squares in float64: of large, odd and strided matrices, whole and in pieces."""

import pytest
import torch
from helpers.device import device

from megatron_muon.runtime import norms


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1000, 700), (2, 300_000), (300_000, 2)])
def test_sum_of_squares_is_the_float64_sum(shape):
    """More elements than are converted at once, in long rows or in many."""
    x = torch.randn(shape).to(device()) * 1e-3
    (found,) = norms.SumOfSquares(x.device)([x])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, x.double().square().sum(), rtol=1e-13, atol=0)


def test_norm_of_a_cut_matrix_has_the_bits_of_the_whole_one():
    """Row and column slices, which are strided, add up to the same fp32 norm."""
    sum_of_squares = norms.SumOfSquares(device())
    for seed in range(20):
        x = torch.randn(257, 129, generator=torch.Generator().manual_seed(seed)).to(device())
        (whole,) = sum_of_squares([x])
        pieces = [x[:100], x[100:, :40], x[100:, 40:]]
        cut = sum_of_squares(pieces).sum()
        assert torch.equal(whole.sqrt().float(), cut.sqrt().float())
