# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Matrices that are orthogonalized while their rows arrive, beside the same that wait for them."""

import functools
import math
from typing import Any, NamedTuple
from unittest import mock

import pytest
from helpers.planned import planned_in
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group

from megatron_muon.plan import domain_plan
from megatron_muon.plan.assignment import Thresholds, assignments

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
# The Gram form multiplies in fp32 on CPU ranks. So results differ where rounding them to bf16 goes
# the other way: by 2^-9 of elements below 1, times a learning rate of 0.02, a scale of at most 7
# and three steps; 2e-4 was measured. The standard steps multiply in bf16, 15 products one after the
# other: 1.2e-3 was measured. Results in a wrong place are off by 0.02 and more.
ATOL = {"gram": 1e-3, "standard": 5e-3}
# More rows than those of other tests, so that most portions have some.
CASES = [
    (24, [100, 0, 61, 3]),
    (160, [16, 9, 0, 23]),
    (40, [10, 10, 10, 10]),
    (16, [33, 40, 40, 15]),
    (24, [16, 48, 0, 64]),
]


class Found(NamedTuple):
    """What a run found.

    Args:
        backend: Its backend.
        is_cut: Whether owners split matrices.
        difference: Largest difference to a run without portions.
        difference_of_copies: The same, of matrices that have copies; 0.0 where none have.
        has_in_place: Whether rows have arrived in place.
    """

    backend: str
    is_cut: bool
    difference: float
    difference_of_copies: float
    has_in_place: bool


def _step_portioned(grid: dict[str, int]) -> list[Found]:
    """Step in portions and as a whole, from one state, with each backend."""
    init_group()
    return [_compared(backend, grid, is_cut) for backend in ATOL for is_cut in (False, True)]


def _step_with_a_backend_without_portions() -> Found:
    from megatron_muon.newton_schulz.standard import Standard

    init_group()
    with mock.patch.object(Standard, "takes_portions", False):
        return _compared("standard", {}, False)


def _step_with_results_in_a_wrong_place() -> Found:
    from megatron_muon.newton_schulz.standard import _StandardRun

    def reversed_lines(self: Any, x: Any, original: Any = _StandardRun._last_product) -> Any:
        return original(self, x).flip(-1)

    init_group()
    with mock.patch.object(_StandardRun, "_last_product", reversed_lines):
        return _compared("standard", {}, False)


def _compared(backend: str, grid: dict[str, int], is_cut: bool) -> Found:
    num_shards = 4 // math.prod(grid.values())
    cases = [(cols, rows[:num_shards]) for cols, rows in CASES]
    exchange = {"wire": "bf16", "newton_schulz": backend, "cost_model": "stack_tiles=4"}
    always = Thresholds(longer_than_fair=0, sparse=1e9, worth_splitting=1e9)
    steps, has_in_place = [], False
    for in_portions in (True, False):
        with (
            planned_in(num_buckets=2, num_portions=3),
            mock.patch.object(
                domain_plan,
                "assignments",
                functools.partial(assignments, thresholds=always if is_cut else None),
            ),
        ):
            built = build_optimizers(
                num_shards,
                {},
                {**exchange, "overlap_within_matrices": in_portions},
                cases=cases,
                **grid,
            )
        (plan,) = built.sharded.compute.plans
        assert plan.order.is_portioned == in_portions
        assert plan.order.num_gathers == (3 if in_portions else 1)
        assert (max(map(len, plan.owners)) > 1) == is_cut
        for step in range(NUM_STEPS):
            built.set_gradients(step)
            built.sharded.step()
        steps.append(built.state())
        if in_portions:
            (buckets,) = built.sharded.compute._engine._plans
            has_in_place = any(buckets._is_in_place)
    differences = [
        float((portioned - whole).abs().max()) if whole.numel() else 0.0
        for (portioned, _), (whole, _) in zip(*steps, strict=True)
    ]
    # A plan has the matrices of all tensor-parallel ranks.
    copied = [matrix.fqn for matrix in plan.matrices if matrix.has_copies]
    of_copies = [
        difference
        for i, difference in enumerate(differences)
        if any(f"layer.{i}.weight" in fqn for fqn in copied)
    ]
    assert bool(of_copies) == ("num_tensor_ranks" in grid)
    return Found(backend, is_cut, max(differences), max(of_copies, default=0.0), has_in_place)


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param({}, id="zero3"),
        pytest.param({"num_tensor_ranks": 2}, id="tp2", marks=pytest.mark.slow),
        pytest.param({"num_replicas": 2}, id="hsdp"),
        pytest.param({"num_replicas": 4}, id="zero0", marks=pytest.mark.slow),
    ],
)
def test_portioned_matrices_have_the_results_of_whole_ones_up_to_rounding(grid):
    """On uneven and empty shards, in stacks, in place, and split over owners.

    Copies of a matrix are not portioned, beside others that are: they have the same bits.
    """
    of_ranks = [
        [Found(*each) for each in found]
        for found in run_ranks(4, _step_portioned, grid).check().results
    ]
    for found in of_ranks:
        for each in found:
            assert each.difference <= ATOL[each.backend], each
            assert each.difference_of_copies == 0.0, each
    # One part alone in a bucket, of a tall matrix.
    if not grid:
        assert any(e.has_in_place for found in of_ranks for e in found if not e.is_cut)


def test_backend_without_portions_works_in_a_portioned_bucket():
    """It waits for all rows. They lie in the order in which they arrive, so sums may differ."""
    for found in run_ranks(4, _step_with_a_backend_without_portions).check().results:
        assert Found(*found).difference <= ATOL["standard"]


def test_results_in_a_wrong_place_are_seen():
    """Otherwise the tolerance of this file would say nothing."""
    found = run_ranks(4, _step_with_results_in_a_wrong_place).check().results
    assert max(Found(*each).difference for each in found) > 4 * ATOL["standard"]
