# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of upstream's gradients: each test is run without the repair too, where it must fail."""

import functools

import pytest
from helpers.repairs import REPAIRS, Repair
from helpers.toy_gpt import EP

pytestmark = pytest.mark.ranks


def _case(repair: Repair) -> object:
    marks = () if repair.name == "group_of_one_rank" else pytest.mark.slow
    return pytest.param(repair, id=repair.name, marks=marks)


@functools.cache
def _norms(repair: Repair) -> tuple[list[float], list[float]]:
    """Return the norms under DDP, on one rank if it can be, and with all repairs."""
    num_ranks = repair.world_size if EP[-2] in repair.flags else 1
    under_ddp = repair._replace(world_size=num_ranks).norms_under_ddp()
    return under_ddp, repair.norms()


@pytest.mark.parametrize("repair", [_case(repair) for repair in REPAIRS])
def test_gradient_norm_is_ddps_and_is_not_without_the_repair(repair: Repair):
    """The norm of the first gradients, before any update, equals DDP's to rounding.

    Without the repair: HFSDP's gradients are dp times too large, its norm is that of one instance's
    shards, and gradients over a group of one rank are scaled again, or added to themselves, with
    each microbatch.
    """
    expected, found = _norms(repair._replace(name="", attribute=""))
    assert found == pytest.approx(expected, rel=repair.rel)
    broken = repair._replace(flags=(*repair.flags, "--train-iters", "1")).norms(is_repaired=False)
    assert broken[0] != pytest.approx(expected[0], rel=10 * repair.rel)
