# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Computations of a rank alone: norms, adjacent tensors, and rows in CPU memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.device import device
from helpers.layouts import one_matrix, plan_of
from helpers.stacks import local_engine, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_muon.plan import CommDtypes
from megatron_muon.plan.cost import CostModel
from megatron_muon.runtime import engine as engine_module
from megatron_muon.runtime import norms
from megatron_muon.runtime.tensors import join_adjacent


def _block_norms(shapes: list[tuple[int, int]]) -> norms.BlockNorms:
    matrices = [one_matrix([rows], num_cols=cols) for rows, cols in shapes]
    return norms.BlockNorms(SimpleNamespace(matrices=matrices), None, device(), device())


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1000, 700), (2, 300_000), (300_000, 2)])
def test_norm_is_that_of_the_float64_sum(shape):
    """Norms equal float64 sums, in the order of the blocks."""
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


def test_only_what_is_adjacent_in_all_lists_is_joined():
    """Tensors are joined only if they are adjacent in all lists."""
    first, second = torch.arange(24.0), torch.arange(100.0, 124.0)
    shapes = [(2, 3), (1, 6), (3, 2), (6,)]
    without_gaps = [part.view(shape) for part, shape in zip(first.split(6), shapes, strict=True)]
    with_gap = [second[0:6], second[6:12], second[13:19].clone(), second[18:24]]
    joined, others = join_adjacent(without_gaps, with_gap)
    assert [each.flatten().tolist() for each in joined] == [
        list(range(12)),
        list(range(12, 18)),
        list(range(18, 24)),
    ]
    assert [each.numel() for each in others] == [12, 6, 6]
    (alone,) = join_adjacent(without_gaps)
    assert [each.numel() for each in alone] == [24]
    alone[0].zero_()
    assert not any(bool(each.any()) for each in without_gaps)
    # Descending, and of two allocations.
    assert len(join_adjacent(without_gaps[::-1])[0]) == 4
    assert len(join_adjacent([torch.ones(2), torch.ones(2)])[0]) == 2
    assert join_adjacent([], []) == [[], []]


CPU = torch.device("cpu")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def _step(comm_dtype: str, on: torch.device, rows_device: torch.device) -> list[torch.Tensor]:
    """Orthogonalize three local matrices, two of them in a stack, one with blocks."""
    matrices = [
        one_matrix([16], 8, f"{i}.weight", s) for i, s in enumerate((None, None, (4, 2, 2)))
    ]
    dtypes = CommDtypes(DTYPES[comm_dtype], DTYPES[comm_dtype])
    plan = plan_of(matrices, CostModel(stack_tiles=4), dtypes)
    of = settings(is_bf16=comm_dtype == "bf16", scale=(0.3, 0.7))
    engine = local_engine([plan], of, on, rows_device)
    generator = torch.Generator().manual_seed(0)
    rows = {i: torch.randn(16, 8, generator=generator).to(rows_device) for i in range(3)}
    results = {i: torch.empty_like(each) for i, each in rows.items()}
    assert sorted(i for done in engine.orthogonalize(rows, results) for i in done) == [0, 1, 2]
    return list(results.values())


@pytest.mark.parametrize("comm_dtype", DTYPES)
def test_no_operation_mixes_devices(comm_dtype, monkeypatch):
    """No operation mixes tensors of CPU and GPU."""
    if not hasattr(torch.Tensor, "grad_dtype") and not torch.cuda.is_available():
        pytest.skip("torch 2.9 looks for a driver, even for fake tensors")
    # Streams and kernels need a GPU.
    monkeypatch.setattr(engine_module, "Chain", lambda device: None)
    monkeypatch.setattr("megatron_muon.runtime.row_moves.uses_kernel", lambda device: False)
    with FakeTensorMode():
        assert {each.device for each in _step(comm_dtype, torch.device("cuda", 0), CPU)} == {CPU}


@pytest.mark.parametrize("comm_dtype", DTYPES)
def test_results_have_the_bits_of_rows_on_the_device(comm_dtype):
    """Rows in CPU memory have the results of rows on the device."""
    on_device = _step(comm_dtype, device(), device())
    in_cpu_memory = _step(comm_dtype, device(), CPU)
    for ours, theirs in zip(in_cpu_memory, on_device, strict=True):
        assert ours.device == CPU and ours.any()
        assert torch.equal(ours, theirs.cpu())
