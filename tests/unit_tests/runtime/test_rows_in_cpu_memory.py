# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows in CPU memory whose matrices are orthogonalized on a GPU, as with CPUOffloadPolicy.

Without a GPU torch's fake tensors show that no operation is given tensors of both devices.
"""

import pytest
import torch
from helpers.device import device
from helpers.layouts import one_matrix, plan_of
from helpers.stacks import local_engine, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_muon.plan import CommDtypes
from megatron_muon.plan.cost import CostModel
from megatron_muon.runtime import engine as engine_module

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
