# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run-level parity: the loss of every iteration against upstream's own Muon under DDP.

Both runs go through the launcher, on the same samples. DDP runs on the fewest ranks that hold the
same blocks of matrices and the same experts, one for most models; one such run serves sharded runs
on any number of ranks. Gradients and their norm are summed in another order, so losses differ by
rounding, as those of upstream's DDP on 3 and 4 ranks do (docs/numerics.md). The tolerances are over
twice the largest difference seen, which ``pytest -rP`` prints:

==========  =========  ======  ===================================================================
setting     tolerance  seen    where the noise comes from
==========  =========  ======  ===================================================================
``high``    5e-7       2.2e-7  fp32 sums; one unit in the last place of a loss is up to 1.2e-7
``medium``  1e-5       1.5e-6  Newton-Schulz in bf16 amplifies the same differences
bf16        1.5e-4     3.1e-5  weights are rounded to bf16 in each iteration
==========  =========  ======  ===================================================================
"""

import functools
from typing import Any

import pytest
import torch
from helpers.broken_optimizers import flip_rows_of_other_ranks, skip_newton_schulz
from helpers.toy_gpt import (
    BF16,
    EP,
    EXPERT_TP,
    FP32_GRADIENTS,
    HFSDP,
    HSDP,
    LATENT,
    MOE,
    NUM_ITERATIONS,
    TP,
    ZERO,
    fsdp_toy_gpt,
    reference,
    relative_differences,
    toy_gpt,
    train,
)

pytestmark = pytest.mark.ranks

HIGH = ("--muon-fp32-matmul-prec", "high")
HIGH_TOLERANCE, MEDIUM_TOLERANCE, BF16_TOLERANCE = 5e-7, 1e-5, 1.5e-4
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def check_parity(
    world_size: int,
    zero: int,
    flags: tuple,
    fsdp_flags: tuple,
    tolerance: float,
    num_microbatches: int = 1,
):
    """Compare every iteration's loss with the reference's."""
    run = train(world_size, fsdp_toy_gpt(ZERO[zero], *flags, *fsdp_flags), num_microbatches)
    expected = reference(*flags, compared_with=world_size, num_microbatches=num_microbatches).losses
    differences = relative_differences(run.losses, expected)
    assert len(differences) == NUM_ITERATIONS
    assert run.losses[-1] < run.losses[0] - 0.2
    print(f"largest relative difference: {max(differences):.1e}")
    assert max(differences) <= tolerance, differences


def check_flags(world_size: int, base: tuple, groups: list[str], least: float):
    """Compare a run with all groups of flags at once with upstream's.

    Upstream's losses change where any group is left out, so a flag that Megatron-FSDP ignored would
    be found.
    """
    every = [flag for group in groups for flag in group.split()]
    check_parity(world_size, 3, (*base, *every), (), HIGH_TOLERANCE)
    expected = reference(*base, *every, compared_with=world_size).losses
    for left_out in groups:
        others = [flag for group in groups if group != left_out for flag in group.split()]
        without = reference(*base, *others, compared_with=world_size).losses
        assert max(relative_differences(without, expected)) > least, left_out


@pytest.mark.parametrize(("world_size", "zero"), [slow(2, 0), slow(3, 1), slow(4, 2), (3, 3)])
def test_every_zero_stage_trains_like_ddp(world_size, zero):
    """ZeRO-0 to ZeRO-3 on even and odd numbers of ranks.

    The functional cases have ZeRO-1 to ZeRO-3 on two ranks, with the same tolerance.
    """
    check_parity(world_size, zero, HIGH, (), HIGH_TOLERANCE, num_microbatches=2)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.slow
def test_hsdp_trains_like_ddp(zero):
    """Two replicas of two shards, which share the work."""
    check_parity(4, zero, HIGH, HSDP, HIGH_TOLERANCE, num_microbatches=2)


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_hfsdp_trains_like_ddp(world_size):
    """Optimizer shards cut over inner and outer ranks, also with a single inner rank."""
    check_parity(world_size, 3, HIGH, HFSDP, HIGH_TOLERANCE, num_microbatches=2)


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed"])
@pytest.mark.slow
def test_tensor_parallel_modes_train_like_ddp(mode):
    """TP 2, dp 2, ZeRO-0: Newton-Schulz of the block, and of the whole matrix.

    The bf16 wire has ZeRO-3, and Newton-Schulz spread over both ranks.
    """
    check_parity(4, 0, (*HIGH, *TP, "--muon-tp-mode", mode), (), HIGH_TOLERANCE)


def _step_replicas_by_the_parent() -> None:
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.step.muon_step import MuonStep

    def step(self: Any) -> None:
        for muon in self.optimizers:
            TensorParallelMuon.step(muon)

    MuonStep.step = step


@pytest.mark.slow
def test_upstreams_muon_is_wrong_on_replicas_under_tensor_parallelism():
    """Why no_shard has our subclass: to upstream the block is as large as the whole matrix."""
    flags = (*HIGH, *TP, "--muon-tp-mode", "blockwise")
    run = train(2, fsdp_toy_gpt(ZERO[0], *flags), before=_step_replicas_by_the_parent)
    assert max(relative_differences(run.losses, reference(*flags).losses)) > 100 * HIGH_TOLERANCE


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param((*EP, EXPERT_TP, "2", "--moe-layer-freq", "[0,1]"), id="ep2_etp2"),
        pytest.param((*MOE, *TP, "--sequence-parallel", EXPERT_TP, "2"), id="tp2_etp2"),
        pytest.param((*EP, *TP, "--sequence-parallel", EXPERT_TP, "1"), id="tp2_ep2"),
    ],
)
@pytest.mark.slow
def test_experts_and_dense_layers_train_like_ddp(parallelism):
    """Experts over expt_dp, dense layers over dp_cp; in ep2_etp2 expt_dp is a single rank.

    EP 2 alone is a functional case.
    """
    check_parity(4, 3, (*HIGH, *parallelism), (), HIGH_TOLERANCE, num_microbatches=2)


@pytest.mark.parametrize("outer", [HSDP, HFSDP], ids=["hsdp", "hfsdp"])
@pytest.mark.slow
def test_experts_train_like_ddp_in_hybrid_sharding(outer):
    """EP 2 leaves one inner rank for experts: their shards are cut over the outer ranks alone."""
    check_parity(4, 3, (*HIGH, *EP), outer, HIGH_TOLERANCE, num_microbatches=2)


@pytest.mark.parametrize(
    ("world_size", "model", "flags"),
    [
        pytest.param(2, (), ["--muon-split-glu", "--muon-no-split-qkv"], id="glu"),
        slow(2, (), ["--muon-split-qkv-per-head"], id="heads"),
        slow(2, LATENT, ["--muon-split-mla", "--muon-split-qkv-per-head"], id="latent_heads"),
        slow(
            *(4, (*TP, *LATENT, "--muon-tp-mode", "duplicated")),
            ["--muon-split-mla", "--muon-split-glu"],
            id="latent_glu_tp2",
        ),
        slow(
            *(4, (*LATENT, *EP, "--moe-shared-expert-intermediate-size", "24")),
            ["--muon-split-mla", "--muon-split-glu", "--moe-router-skip-muon"],
            id="deepseek",
        ),
    ],
)
def test_split_matrices_train_like_ddp_with_the_same_flags(world_size, model, flags):
    """Upstream's own code splits what the flags tag, and each of them changes what is trained."""
    check_flags(world_size, (*HIGH, *model), flags, 10 * HIGH_TOLERANCE)


def test_medium_precision_trains_like_ddp():
    """The default: Newton-Schulz in bf16."""
    check_parity(2, 1, (), (), MEDIUM_TOLERANCE)


FP32_WIRE = ("--muon-fsdp-wire", "fp32")
# Nearly the least that works.
LITTLE_MEMORY = "--muon-fsdp-staging-bytes"


@pytest.mark.parametrize(
    ("world_size", "zero", "flags", "tolerance"),
    [
        pytest.param(
            3, 3, (*FP32_WIRE, LITTLE_MEMORY, "30000"), MEDIUM_TOLERANCE, id="fp32_wire_buckets"
        ),
        pytest.param(4, 3, (*HSDP, LITTLE_MEMORY, "12000"), MEDIUM_TOLERANCE, id="bf16_wire_hsdp"),
        pytest.param(2, 0, (LITTLE_MEMORY, "9000"), MEDIUM_TOLERANCE, id="bf16_wire_replicas"),
    ],
)
@pytest.mark.slow
def test_both_wires_train_like_ddp(world_size, zero, flags, tolerance):
    """Newton-Schulz in bf16 with either wire, matrices of a few kilobytes a bucket."""
    check_parity(world_size, zero, (), flags, tolerance)


@pytest.mark.slow
def test_tensor_parallel_blocks_train_like_ddp_on_the_bf16_wire():
    """Owners of whole matrices gather blocks of both tensor-parallel ranks, in bf16."""
    check_parity(4, 3, (*TP, "--muon-tp-mode", "distributed"), (), MEDIUM_TOLERANCE)


@pytest.mark.parametrize(("world_size", "zero"), [slow(2, 0), slow(2, 1), slow(3, 2), (2, 3)])
def test_bf16_trains_like_ddp(world_size, zero):
    """bf16 weights with fp32 main weights."""
    check_parity(world_size, zero, BF16, FP32_GRADIENTS, BF16_TOLERANCE)


@pytest.mark.slow
def test_muon_flags_do_what_they_do_under_ddp():
    """All flags at once change the run as they change upstream's, and each of them does."""
    flags = [
        "--muon-momentum 0.8",
        "--muon-scale-mode unit_rms_norm",
        "--muon-coefficient-type polar_express",
        "--muon-num-ns-steps 3",
        "--muon-extra-scale-factor 4",
        "--muon-scalar-optimizer lion",
        "--muon-no-split-qkv",
    ]
    check_flags(2, (*HIGH, "--lr", "1e-3"), flags, 20 * HIGH_TOLERANCE)


@pytest.mark.slow
def test_nesterov_off_trains_like_ddp():
    """Without --muon-nesterov the momentum itself is orthogonalized."""
    without = [flag for flag in toy_gpt(*HIGH) if flag != "--muon-nesterov"]
    fsdp = [flag for flag in fsdp_toy_gpt(ZERO[3], *HIGH) if flag != "--muon-nesterov"]
    found = train(2, fsdp).losses
    assert max(relative_differences(found, train(1, without).losses)) <= HIGH_TOLERANCE
    assert max(relative_differences(found, reference(*HIGH).losses)) > 20 * HIGH_TOLERANCE


def _skip_large_gradients() -> None:
    """Set what no flag of Megatron sets."""
    from megatron.training import training

    original = training.get_megatron_optimizer_config

    def get_megatron_optimizer_config(args):
        config, overrides = original(args)
        config.grad_norm_skip_threshold = 0.75
        return config, overrides

    training.get_megatron_optimizer_config = get_megatron_optimizer_config


@pytest.mark.slow
def test_skipped_iterations_and_zero_counts_match_ddp():
    """Steps above grad_norm_skip_threshold change nothing, and zeros are counted once."""
    flags = (*HIGH, "--log-num-zeros-in-grad")
    found = train(2, fsdp_toy_gpt(ZERO[3], *flags), before=_skip_large_gradients)
    expected = reference(*flags, before=_skip_large_gradients)
    skipped = [record["skipped"] for record in found.history]
    assert skipped == [record["skipped"] for record in expected.history]
    assert sum(skipped) > 0
    assert [record["num_zeros"] for record in found.history] == [
        record["num_zeros"] for record in expected.history
    ]
    assert max(relative_differences(found.losses, expected.losses)) <= HIGH_TOLERANCE


@pytest.mark.parametrize(
    "break_it",
    [skip_newton_schulz, pytest.param(flip_rows_of_other_ranks, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("flags", "fsdp_flags", "tolerance"),
    [
        pytest.param(HIGH, (), HIGH_TOLERANCE, id="high"),
        pytest.param((), (), MEDIUM_TOLERANCE, id="medium", marks=pytest.mark.slow),
        pytest.param(BF16, FP32_GRADIENTS, BF16_TOLERANCE, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_broken_newton_schulz_fails_these_tolerances(break_it, flags, fsdp_flags, tolerance):
    """A run without Newton-Schulz, or with wrong rows of other ranks, is told from a right one."""
    run = train(2, fsdp_toy_gpt(ZERO[3], *flags, *fsdp_flags), before=break_it)
    assert max(relative_differences(run.losses, reference(*flags).losses)) > 3 * tolerance


GRAM = ("--muon-fsdp-newton-schulz", "gram")


def _gram_in_fp16() -> None:
    """Round the products of the Gram form as a GPU does: CPU ranks multiply in fp32."""
    from helpers.exact import rounded_products

    from megatron_muon.newton_schulz.gram import Gram

    original = Gram.run

    def run(self: Any, stack: Any, call: Any) -> Any:
        """Emulate fp16 while it runs."""
        with rounded_products(torch.float16):
            return original(self, stack, call)

    Gram.run = run


def _gram_in_fp16_without_restart() -> None:
    from megatron_muon.newton_schulz import gram

    gram.segments_of = lambda coefficient_type, steps: (steps,)
    _gram_in_fp16()


@pytest.mark.slow
def test_gram_form_trains_like_ddp():
    """In fp32 the polynomial is the same, and its rounding is no larger than that of sums."""
    check_parity(2, 3, HIGH, GRAM, HIGH_TOLERANCE)


@pytest.mark.slow
def test_gram_form_trains_like_ddp_on_tensor_parallel_ranks():
    """Owners of whole matrices gather blocks of both tensor-parallel ranks."""
    check_parity(4, 3, (*HIGH, *TP, "--muon-tp-mode", "distributed"), GRAM, HIGH_TOLERANCE)


@pytest.mark.slow
@pytest.mark.cpu_only
def test_gram_form_in_fp16_needs_its_restarts():
    """Coefficients that amplify rounding most. Seen: 1.3e-6 with, 1.6e-4 without restarts."""
    flags = (*HIGH, "--muon-coefficient-type", "polar_express")
    expected = reference(*flags).losses
    fsdp = fsdp_toy_gpt(ZERO[3], *flags, *GRAM)
    right = train(2, fsdp, before=_gram_in_fp16).losses
    assert max(relative_differences(right, expected)) <= 5e-6
    wrong = train(2, fsdp, before=_gram_in_fp16_without_restart).losses
    assert max(relative_differences(wrong, expected)) > 3 * 5e-6
