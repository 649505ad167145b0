# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Matrices that are orthogonalized while their rows arrive, beside the same that wait for them."""

import functools
from typing import Any

import pytest
from helpers.planned import planned_in
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
# The Gram form multiplies in fp32 on CPU ranks. So results differ where rounding them to bf16 goes
# the other way: by 2^-9 of elements below 1, times a learning rate of 0.02, a scale of at most 7
# and three steps; 2e-4 was measured. The standard steps multiply in bf16, 15 products one after the
# other: 1.2e-3 was measured. Results of portions in a wrong place are off by 0.1 and more.
ATOL = {"gram": 1e-3, "standard": 5e-3}
# More rows than the others, so that each portion has some.
CASES = [
    (24, [100, 0, 61, 3]),
    (160, [16, 9, 0, 23]),
    (40, [10, 10, 10, 10]),
    (16, [33, 40, 40, 15]),
    (24, [16, 48, 0, 64]),
]


def _step_portioned(backend: str, grid: dict[str, int], is_cut: bool) -> list[Any]:
    """Step in portions and as a whole, from one state."""
    from megatron_muon.plan.assignment import Thresholds, assign
    from megatron_muon.runtime import owner_compute

    if is_cut:
        always = Thresholds(longer_than_fair=0, sparse=1e9, worth_splitting=1e9)
        owner_compute.assign = functools.partial(assign, thresholds=always)
    init_group()
    num_shards = 4 // grid.get("num_tensor_ranks", 1)
    cases = [(cols, rows[:num_shards]) for cols, rows in CASES]
    exchange = {"wire": "bf16", "newton_schulz": backend, "cost_model": "stack_tiles=4"}
    steps, has_in_place = [], []
    for in_portions in (True, False):
        with planned_in(num_buckets=2, num_portions=3):
            built = build_optimizers(
                num_shards,
                {},
                {**exchange, "overlap_within_matrices": in_portions},
                cases=cases,
                **grid,
            )
        for step in range(NUM_STEPS):
            built.set_gradients(step)
            built.sharded.step()
        steps.append(built.state())
        plan = built.sharded.compute.plans[0]
        assert plan.order.is_portioned == in_portions and plan.order.num_gathers == (
            3 if in_portions else 1
        )
        assert (max(map(len, plan.owners)) > 1) == is_cut
        plans = built.sharded.compute._engine._plans
        has_in_place.append(any(any(plan._is_in_place) for plan in plans))
    differences = [
        float((portioned - whole).abs().max()) if whole.numel() else 0.0
        for (portioned, _), (whole, _) in zip(*steps, strict=True)
    ]
    return [differences, has_in_place[0]]


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("grid", [{}, {"num_tensor_ranks": 2}], ids=["zero3", "tp2"])
@pytest.mark.parametrize("backend", ["standard", "gram"])
def test_portioned_matrices_have_the_results_of_whole_ones_up_to_rounding(backend, grid, is_cut):
    """On uneven and empty shards, in stacks, in place, and split over owners."""
    run = run_ranks(4, _step_portioned, backend, grid, is_cut).check()
    for differences, _ in run.results:
        assert max(differences) <= ATOL[backend], differences
    # One part alone in a bucket, of a tall matrix.
    if not grid and not is_cut:
        assert any(has_in_place for _, has_in_place in run.results)
