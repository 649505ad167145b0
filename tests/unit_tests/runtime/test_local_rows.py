# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows of this rank in few calls: experts, and fused query, key and value."""

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.device import device
from helpers.layouts import rows_cut_at
from helpers.stacks import orthogonalized
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan import ExchangePlan, Wire
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import whole_matrix
from megatron_muon.plan.owners import choose_owners
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.plan_runner import BoundPlan

NUM_MATRICES, ROWS, COLS = 6, 16, 8


class _Counted(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _orthogonalize(
    rows: list[torch.Tensor], split_shapes: tuple[int, ...] | None = None
) -> tuple[list[torch.Tensor], Counter[str]]:
    """Orthogonalize whole local matrices in their own memory; four of a shape make a stack."""
    cost, wire = CostModel(stack_tiles=4), Wire.of("bf16", is_bf16=True)
    matrices = [
        whole_matrix(f"{i}.weight", rows_cut_at(ROWS, COLS, [ROWS]), [[(0,)]],
                     split_shapes=split_shapes)
        for i in range(len(rows))
    ]  # fmt: skip
    assignment = choose_owners(matrices, cost, wire)
    plan = ExchangePlan.build(matrices, assignment, cost, wire, staging_bytes=2**20)
    params = [torch.empty(ROWS, COLS, device=device()) for _ in rows]
    engine = Engine(
        [BoundPlan(plan, dict(enumerate(params)), None, None, {})],
        RankSchedule.build([plan], rank=0),
        NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (0.3, 0.7)),
        rank=0,
        device=device(),
    )
    by_param = dict(zip(params, rows, strict=True))
    with _Counted() as counted:
        done = [param for params in engine.orthogonalize(by_param, by_param) for param in params]
    assert sorted(map(id, done)) == sorted(map(id, params))
    return rows, counted.calls


@pytest.mark.parametrize("gap", [0, 24], ids=["adjacent", "apart"])
def test_experts_that_lie_evenly_take_one_call_a_stack(gap):
    """As gradients of a layer's experts lie in Megatron-FSDP's buffer; the bits are the same."""
    size = ROWS * COLS + gap
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(NUM_MATRICES * size, generator=generator).to(device())
    even = [memory[i * size :][: ROWS * COLS].view(ROWS, COLS) for i in range(NUM_MATRICES)]
    apart = [rows.clone() for rows in even]
    gaps = [memory[i * size + ROWS * COLS : (i + 1) * size].clone() for i in range(NUM_MATRICES)]
    found, calls = _orthogonalize(even)
    expected, calls_apart = _orthogonalize(apart)
    assert all(map(torch.equal, found, expected))
    # Stacks of four and of two: rows in, results out, and the second factor.
    assert calls["div"] == calls["mul"] == calls["_foreach_mul_"] == 2
    assert calls_apart["div"] == calls_apart["mul"] == NUM_MATRICES
    kept = [memory[i * size + ROWS * COLS : (i + 1) * size] for i in range(NUM_MATRICES)]
    assert all(map(torch.equal, gaps, kept))


def test_query_groups_of_a_block_take_one_call():
    """Two groups of query, key and value: three calls a matrix, not six."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(ROWS, COLS, generator=generator).to(device())]
    whole = rows[0].clone()
    (found,), calls = _orthogonalize(rows, split_shapes=(4, 2, 2))
    assert calls["div"] == calls["mul"] == 3
    # Each block alone: rows of the two groups, joined. Key and value are a stack of two, and a
    # batched product may have other last bits; one of bf16 at 0.2 is 1e-3.
    for start, num_rows in ((0, 4), (4, 2), (6, 2)):
        index = [8 * group + start + row for group in (0, 1) for row in range(num_rows)]
        block = whole[index].double()
        norm = block.square().sum().sqrt().float()
        x = (whole[index] / norm).bfloat16()
        result = orthogonalized(x.unsqueeze(0))[0]
        torch.testing.assert_close(found[index], result.float() * 0.3 * 0.7, rtol=0, atol=1e-2)
