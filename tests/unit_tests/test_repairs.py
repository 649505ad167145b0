# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of upstream's gradients: each test is run without the repair too, where it must fail."""

import functools
import sys

import pytest
from ranks import launch
from toy_gpt import MOE, fsdp_toy_gpt, toy_gpt

# Adam, so that only upstream's own optimizer is under test; SGD-like parity is in test_parity.py.
ADAM = ("--optimizer", "adam", "--lr", "1e-3", "--train-iters", "3", "--lr-warmup-iters", "0")
HFSDP = (
    *("--num-distributed-optimizer-instances", "2"),
    *("--outer-dp-sharding-strategy", "optim"),
)
EP = (*MOE, "--expert-model-parallel-size", "2")
# No scaling of gradients, and a copy of them in another dtype for the wire.
PER_TOKEN = (*EP, "--bf16", "--calculate-per-token-loss")
BF16_ON_THE_WIRE = (
    *("--megatron-fsdp-main-grads-dtype", "fp32"),
    *("--megatron-fsdp-grad-comm-dtype", "bf16"),
)


def _without(attribute: str) -> None:
    """Take one patch out of the list before the launcher enables it."""
    from megatron_muon.mcore import patches

    kept = tuple(patch for patch in patches.PATCHES if patch.target.attribute != attribute)
    assert len(kept) == len(patches.PATCHES) - 1
    patches.PATCHES = kept
    assert "megatron_muon.mcore.patches" in sys.modules


def _grad_norms(world_size: int, flags: list[str], without: str | None = None) -> list[float]:
    before = functools.partial(_without, without) if without else None
    run = launch(world_size, flags, before=before).check()
    return [record["grad_norm"] for record in run.history]


CASES = [
    pytest.param("_create_hfsdp_helper_buffer", 4, (), HFSDP, 1e-5, id="scaling_factor"),
    pytest.param(
        "_get_megatron_optimizer_based_on_param_groups", 4, (), HFSDP, 1e-5, id="instances"
    ),
    pytest.param("__init__", 2, EP, (), 1e-5, id="group_of_one_rank"),
    pytest.param("__init__", 2, PER_TOKEN, BF16_ON_THE_WIRE, 1e-2, id="added_to_itself"),
]


@pytest.mark.parametrize(("attribute", "world_size", "flags", "fsdp_flags", "rel"), CASES)
def test_gradient_norm_is_ddps_and_is_not_without_the_repair(
    attribute, world_size, flags, fsdp_flags, rel
):
    """The norm of the first gradients, before any update, equals DDP's to rounding.

    Without the repair: HFSDP's gradients are dp times too large, its norm is that of one instance's
    shards, and gradients over a group of one rank are scaled again, or added to themselves, with
    each microbatch.
    """
    expected = _grad_norms(world_size, toy_gpt(*ADAM, *flags))
    sharded = fsdp_toy_gpt("optim_grads_params", *ADAM, *flags, *fsdp_flags)
    assert _grad_norms(world_size, sharded) == pytest.approx(expected, rel=rel)
    broken = _grad_norms(world_size, sharded, without=attribute)
    assert broken[0] != pytest.approx(expected[0], rel=10 * rel)
