# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How many buckets are taken, and how many of them are under way."""

from helpers.layouts import rows_cut_at
from helpers.planned import assign, planned_in

from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.cost import CPU_RANKS, CostModel
from megatron_muon.plan.layout import whole_matrix
from megatron_muon.plan.wire import Wire

_WIRE = Wire.of("bf16", is_bf16=True)


def test_each_further_bucket_gains_the_latency_of_a_collective():
    """The step is predicted shorter in 16 than in 2, but not by what 14 more buckets take."""
    shapes = [(128, 128), (384, 128), (512, 128), (128, 512)] * 32
    cells = [[(rank,) for rank in range(4)]]
    matrices = [
        whole_matrix(f"{i}.weight", rows_cut_at(rows, cols, [rows // 4] * 4), cells)
        for i, (rows, cols) in enumerate(shapes)
    ]
    assignment = assign(matrices, CPU_RANKS, _WIRE)

    def plan(num_buckets: int | None = None) -> ExchangePlan:
        with planned_in(num_buckets=num_buckets):
            return ExchangePlan.build(matrices, assignment, CPU_RANKS, _WIRE, staging_bytes=2**31)

    chosen, fewer, more = plan(), plan(1), plan(16)
    latency_s = CPU_RANKS.latency_seconds(range(4))
    assert len(chosen.buckets) == 2 and len(more.buckets) == 16
    assert fewer.predicted_step_s - chosen.predicted_step_s > latency_s
    assert 0 < chosen.predicted_step_s - more.predicted_step_s < 14 * latency_s


def test_more_is_under_way_where_memory_allows_and_the_step_gains():
    """Half of the memory, as each of two kinds has it, leaves less; plenty leaves no more."""
    matrices = [
        whole_matrix(f"{index}.weight", rows_cut_at(48, 64, [24, 24]), [[(0,), (1,)]])
        for index in range(32)
    ]
    cost = CostModel(stack_tiles=1)
    assignment = assign(matrices, cost, _WIRE)
    half, whole, plenty = (
        ExchangePlan.build(matrices, assignment, cost, _WIRE, staging_bytes=limit)
        for limit in (25_000, 50_000, 2**31)
    )
    assert half.order.depth == (1, 1) and whole.order.depth == (2, 2)
    assert plenty.order.depth == whole.order.depth and plenty.staging_bytes < 150_000
    # The step is as long in fewer buckets.
    assert len(plenty.buckets) < len(whole.buckets)
