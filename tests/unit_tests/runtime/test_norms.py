# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums of squares in float64: of large, odd and strided matrices, whole and in pieces."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.device import device
from helpers.layouts import one_matrix

from megatron_muon.runtime import norms


def _block_norms(shapes: list[tuple[int, int]]) -> norms.BlockNorms:
    matrices = [one_matrix([rows], num_cols=cols) for rows, cols in shapes]
    return norms.BlockNorms(SimpleNamespace(matrices=matrices), None, device(), device())


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1000, 700), (2, 300_000), (300_000, 2)])
def test_norm_is_that_of_the_float64_sum(shape):
    """Norms are those of float64 sums, in the order of the blocks."""
    shapes = [(3, 5), shape, (4, 5), (3, 5), shape]
    rows = [torch.randn(each).to(device()) * 1e-3 for each in shapes]
    block_norms = _block_norms(shapes)
    block_norms.bind(rows)
    block_norms.reduce()
    expected = [each.double().square().sum().sqrt().float() for each in rows]
    assert torch.equal(block_norms.values, torch.stack(expected))


@pytest.mark.cpu_only
def test_cpu_converts_a_large_matrix_piece_by_piece(monkeypatch):
    """A CPU converts a large matrix to float64 piece by piece."""
    seen: list[int] = []

    def counted(tensors: Any) -> torch.Tensor:
        seen.extend(each.numel() for each in tensors)
        return original(tensors)

    original = norms.sums_of_squares
    monkeypatch.setattr(norms, "sums_of_squares", counted)
    block_norms = _block_norms([(1000, 700)])
    block_norms.bind([torch.ones(1000, 700)])
    block_norms.reduce()
    assert sum(seen) == 700_000 and max(seen) <= 2**18
    assert block_norms.values.tolist() == [pytest.approx(700_000**0.5)]


def test_norm_of_a_cut_matrix_has_the_bits_of_the_whole_one():
    """Strided slices of a matrix add up to the same fp32 norm."""
    for seed in range(20):
        x = torch.randn(257, 129, generator=torch.Generator().manual_seed(seed)).to(device())
        (whole,) = norms.sums_of_squares([x])
        cut = norms.sums_of_squares([x[:100], x[100:, :40], x[100:, 40:]]).sum()
        assert torch.equal(whole.sqrt().float(), cut.sqrt().float())
