# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows in CPU memory whose matrices are orthogonalized on a GPU, as with CPUOffloadPolicy.

Without a GPU torch's fake tensors show that no operation is given tensors of both devices.
"""

import pytest
import torch
from helpers.device import device
from helpers.layouts import plan_of, rows_cut_at, whole_matrix
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_muon.newton_schulz import standard
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings, coefficients_of
from megatron_muon.plan import CommDtypes
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.runtime import engine as engine_module
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.plan_runner import BoundPlan

CPU = torch.device("cpu")
ROWS, COLS = 16, 8


def _engine(comm_dtype: str, on: torch.device, rows_device: torch.device | None) -> Engine:
    """Return an engine of three local matrices, two of them in a stack, with blocks."""
    matrices = [
        whole_matrix(
            f"{i}.weight", rows_cut_at(ROWS, COLS, [ROWS]), [[(0,)]], split_shapes=split_shapes
        )
        for i, split_shapes in enumerate((None, None, (4, 2, 2)))
    ]
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[comm_dtype]
    plan = plan_of(matrices, CostModel(stack_tiles=4), CommDtypes(dtype, dtype))
    return Engine(
        [BoundPlan(plan, {i: i for i in range(len(matrices))}, None, None, {})],
        RankSchedule.build([plan], rank=0),
        NewtonSchulzSettings(5, "quintic", comm_dtype == "bf16", lambda rows, cols: (0.3, 0.7)),
        device=on,
        rows_device=rows_device,
    )


def _step(engine: Engine, rows_device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = {i: torch.randn(ROWS, COLS, generator=generator).to(rows_device) for i in range(3)}
    results = {i: torch.empty_like(each) for i, each in rows.items()}
    assert sorted(i for done in engine.orthogonalize(rows, results) for i in done) == [0, 1, 2]
    return list(results.values())


@pytest.mark.parametrize("comm_dtype", ["fp32", "bf16"])
def test_no_operation_mixes_devices(comm_dtype, monkeypatch):
    """An error of fake tensors, as of a GPU."""
    if not hasattr(torch.Tensor, "grad_dtype") and not torch.cuda.is_available():
        pytest.skip("torch 2.9 looks for a driver, even for fake tensors")
    # Streams and kernels need a GPU.
    monkeypatch.setattr(engine_module, "Chain", lambda device: None)
    monkeypatch.setattr("megatron_muon.runtime.row_moves.uses_kernel", lambda device: False)
    # Comparisons of values, which fake tensors have none of.
    monkeypatch.setattr(standard, "_tall_steps_keep_bits", lambda shape, device: True)
    coefficients_of(5, "quintic")
    gpu = torch.device("cuda", 0)
    with FakeTensorMode():
        assert {each.device for each in _step(_engine(comm_dtype, gpu, CPU), CPU)} == {CPU}


@pytest.mark.parametrize("comm_dtype", ["fp32", "bf16"])
def test_results_have_the_bits_of_rows_on_the_device(comm_dtype):
    """Which only a GPU shows: on CPU ranks both are the same memory."""
    own = device()
    on_device = _step(_engine(comm_dtype, own, None), own)
    in_cpu_memory = _step(_engine(comm_dtype, own, CPU), CPU)
    for ours, theirs in zip(in_cpu_memory, on_device, strict=True):
        assert ours.device == CPU and ours.any()
        assert torch.equal(ours, theirs.cpu())
