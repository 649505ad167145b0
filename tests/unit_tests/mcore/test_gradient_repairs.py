# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of upstream's gradients: each test is run without the repair too, where it must fail."""

import functools

import pytest
from helpers.ranks import launch
from helpers.repairs import without
from helpers.toy_gpt import EP, HFSDP, fsdp_toy_gpt, toy_gpt

pytestmark = pytest.mark.ranks

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Adam, so that only upstream's own optimizer is under test; parity of Muon is in test_parity.py.
# Several microbatches: three on four ranks, six on two.
ADAM = tuple(
    "--optimizer adam --lr 1e-3 --train-iters 3 --lr-warmup-iters 0 --global-batch-size 12".split()
)
# No scaling of gradients, and a copy of them in another dtype for the reduction.
PER_TOKEN = (*EP, "--bf16", "--calculate-per-token-loss")
BF16_REDUCTION = (
    *("--megatron-fsdp-main-grads-dtype", "fp32"),
    *("--megatron-fsdp-grad-comm-dtype", "bf16"),
)


def _norms(world_size: int, flags: list[str], missing: str | None = None) -> list[float]:
    """Return the gradient norm of each iteration."""
    before = functools.partial(without, missing) if missing else None
    return [each["grad_norm"] for each in launch(world_size, flags, before=before).check().history]


@functools.cache
def _sound_norms(
    world_size: int, flags: tuple[str, ...], fsdp_flags: tuple[str, ...]
) -> tuple[list[float], list[float]]:
    """Return the norms under DDP, on one rank if possible, and under FSDP with all repairs."""
    num_ranks = world_size if EP[-2] in flags else 1
    under_fsdp = fsdp_toy_gpt("optim_grads_params", *ADAM, *flags, *fsdp_flags)
    return _norms(num_ranks, toy_gpt(*ADAM, *flags)), _norms(world_size, under_fsdp)


@pytest.mark.parametrize(
    ("patch", "world_size", "flags", "fsdp_flags", "rel"),
    [
        slow("_create_hfsdp_helper_buffer", 4, (), HFSDP, 1e-5, id="scaling_factor"),
        slow("_get_megatron_optimizer_based_on_param_groups", 4, (), HFSDP, 1e-5, id="instances"),
        pytest.param("DataParallelBuffer.__init__", 2, EP, (), 1e-5, id="group_of_one_rank"),
        slow(
            *("DataParallelBuffer.__init__", 2, PER_TOKEN, BF16_REDUCTION, 1e-2),
            id="added_to_itself",
        ),
    ],
)
def test_gradient_norm_is_ddps_and_is_not_without_the_repair(
    patch, world_size, flags, fsdp_flags, rel
):
    """The norm of the first gradients, before any update, equals DDP's to rounding.

    Without the repair: HFSDP's gradients are dp times too large, its norm is that of one instance's
    shards, and gradients over a group of one rank are scaled again, or added to themselves, with
    each microbatch.
    """
    expected, found = _sound_norms(world_size, flags, fsdp_flags)
    assert found == pytest.approx(expected, rel=rel)
    one = fsdp_toy_gpt("optim_grads_params", *ADAM, *flags, *fsdp_flags, "--train-iters", "1")
    broken = _norms(world_size, one, missing=patch)
    assert broken[0] != pytest.approx(expected[0], rel=10 * rel)
