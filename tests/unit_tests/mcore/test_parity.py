# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run-level parity: losses and gradient norms against upstream's own optimizers under DDP.

Both runs go through the launcher, on the same samples; ``helpers/parity.py`` has the tolerances.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.broken_optimizers import flip_rows_of_other_ranks, skip_newton_schulz
from helpers.parity import (
    ADAM,
    BF16_TOLERANCE,
    EXPERTS_IN_ONE,
    HIGH,
    HIGH_TOLERANCE,
    MEDIUM_TOLERANCE,
    TEN,
    check_losses,
    check_losses_and_norms,
    slow,
)
from helpers.toy_gpt import (
    BF16,
    EP,
    EXPERT_TP,
    FP32_GRADIENTS,
    HFSDP,
    HSDP,
    INTERLEAVED,
    LATENT,
    MOE,
    NO_MATRIX,
    PP,
    TIED,
    TP,
    ZERO,
    fsdp_toy_gpt,
    reference,
    relative_differences,
    toy_gpt,
    train,
)

pytestmark = pytest.mark.ranks


def fsdp(zero: int) -> Callable[..., list[str]]:
    """Return what makes the flags of the toy GPT under Megatron-FSDP."""
    return functools.partial(fsdp_toy_gpt, ZERO[zero])


TWO = 2  # microbatches
BLOCKS = ("--muon-tp-mode", "blockwise")
WHOLE = ("--muon-tp-mode", "distributed")
HIGH_EP_TP = (*HIGH, *EP, *TP, "--sequence-parallel", EXPERT_TP, "1")
HIGH_MOE_TP = (*HIGH, *MOE, *TP, "--sequence-parallel", EXPERT_TP, "2")
# expt_dp is a single rank.
HIGH_EP_ETP = (*HIGH, *EP, EXPERT_TP, "2", "--moe-layer-freq", "[0,1]")
GRAM = ("--muon-fsdp-newton-schulz", "gram")
FP32_MESSAGES = ("--muon-fsdp-comm-dtype", "fp32")
# Nearly the least that works, matrices of a few kilobytes a bucket.
LITTLE_MEMORY = "--muon-fsdp-staging-bytes"
IN_BF16 = (BF16, FP32_GRADIENTS, BF16_TOLERANCE)


# The functional cases have ZeRO-1 to ZeRO-3 and EP 2 on two ranks, with the same tolerance.
@pytest.mark.parametrize(
    ("world_size", "zero", "settings"),
    [
        slow(2, 0, (HIGH, (), HIGH_TOLERANCE, TWO), id="zero0"),
        slow(3, 1, (HIGH, (), HIGH_TOLERANCE, TWO), id="zero1"),
        slow(4, 2, (HIGH, (), HIGH_TOLERANCE, TWO), id="zero2"),
        pytest.param(3, 3, (HIGH, (), HIGH_TOLERANCE, TWO), id="zero3"),
        # Two replicas of two shards, which share the work.
        slow(4, 0, (HIGH, HSDP, HIGH_TOLERANCE, TWO), id="hsdp_zero0"),
        slow(4, 2, (HIGH, HSDP, HIGH_TOLERANCE, TWO), id="hsdp_zero2"),
        # Shards cut over inner and outer ranks, also with a single inner rank.
        pytest.param(2, 3, (HIGH, HFSDP, HIGH_TOLERANCE, TWO), id="hfsdp_one_inner_rank"),
        slow(4, 3, (HIGH, HFSDP, HIGH_TOLERANCE, TWO), id="hfsdp"),
        # Newton-Schulz of the block, and of the whole matrix.
        slow(4, 0, ((*HIGH, *TP, *BLOCKS),), id="tp2_blockwise"),
        slow(4, 0, ((*HIGH, *TP, "--muon-tp-mode", "duplicated"),), id="tp2_duplicated"),
        slow(4, 0, ((*HIGH, *TP, *WHOLE),), id="tp2_distributed"),
        # Experts over expt_dp, dense layers over dp_cp.
        slow(4, 3, (HIGH_EP_ETP, (), HIGH_TOLERANCE, TWO), id="ep2_etp2"),
        slow(4, 3, (HIGH_MOE_TP, (), HIGH_TOLERANCE, TWO), id="tp2_etp2"),
        slow(4, 3, (HIGH_EP_TP, (), HIGH_TOLERANCE, TWO), id="tp2_ep2"),
        # One inner rank for experts: their shards are cut over the outer ranks alone.
        slow(4, 3, ((*HIGH, *EP), HSDP, HIGH_TOLERANCE, TWO), id="ep2_hsdp"),
        slow(4, 3, ((*HIGH, *EP), HFSDP, HIGH_TOLERANCE, TWO), id="ep2_hfsdp"),
        # The default: Newton-Schulz in bf16, with either dtype of messages.
        pytest.param(2, 1, ((), (), MEDIUM_TOLERANCE), id="medium"),
        slow(
            3,
            3,
            ((), (*FP32_MESSAGES, LITTLE_MEMORY, "30000"), MEDIUM_TOLERANCE),
            id="fp32_messages",
        ),
        slow(
            4, 3, ((), (*HSDP, LITTLE_MEMORY, "29000"), MEDIUM_TOLERANCE), id="bf16_messages_hsdp"
        ),
        slow(2, 0, ((), (LITTLE_MEMORY, "26000"), MEDIUM_TOLERANCE), id="bf16_messages_replicas"),
        # Owners of whole matrices gather blocks of both tensor-parallel ranks, in bf16.
        slow(4, 3, ((*TP, *WHOLE), (), MEDIUM_TOLERANCE), id="bf16_messages_tp2"),
        slow(2, 0, IN_BF16, id="bf16_zero0"),
        slow(2, 1, IN_BF16, id="bf16_zero1"),
        slow(3, 2, IN_BF16, id="bf16_zero2"),
        pytest.param(2, 3, IN_BF16, id="bf16_zero3"),
        # In fp32 the polynomial is the same, and its rounding no larger than that of sums.
        slow(2, 3, (HIGH, GRAM), id="gram"),
        slow(4, 3, ((*HIGH, *TP, *WHOLE), GRAM), id="gram_tp2"),
    ],
)
def test_trains_like_ddp(world_size, zero, settings):
    """Losses of every layout and precision."""
    check_losses(world_size, zero, *settings)


@pytest.mark.parametrize(
    ("world_size", "zero", "flags", "fsdp_flags"),
    [
        slow(4, 0, PP, (), id="zero0"),
        slow(4, 1, PP, (), id="zero1"),
        slow(4, 2, PP, (), id="zero2"),
        pytest.param(4, 3, PP, (), id="zero3"),
        slow(6, 3, PP, (), id="three_ranks_per_stage"),
        slow(4, 2, PP, HSDP, id="hsdp"),
        slow(4, 3, PP, HFSDP, id="hfsdp"),
        slow(4, 3, (*PP, *EP), (), id="ep2"),
        slow(4, 0, (*EXPERTS_IN_ONE, *EP[-2:]), (), id="experts_in_one_zero0_ep2"),
        slow(4, 3, EXPERTS_IN_ONE, (), id="experts_in_one_zero3"),
        slow(4, 3, (*PP, *TP), (), id="tp2_dp1"),
        slow(8, 3, (*PP, *TP, *EP, "--sequence-parallel"), (), id="tp2_ep2"),
        pytest.param(4, 1, (*INTERLEAVED, TIED), (), id="zero1_interleaved_tied"),
        slow(4, 3, INTERLEAVED, (), id="zero3_interleaved"),
        slow(4, 0, (*PP, TIED), (), id="zero0_tied"),
        slow(4, 3, (*PP, TIED), HFSDP, id="hfsdp_tied"),
        slow(8, 2, (*PP, *TP, TIED), HSDP, id="hsdp_tp2_tied"),
        pytest.param(4, 3, NO_MATRIX, (), id="zero3_stage_without_matrix"),
        slow(4, 3, (*PP, "--mtp-num-layers", "1"), (), id="zero3_mtp"),
    ],
)
def test_stages_train_like_ddp(world_size, zero, flags, fsdp_flags):
    """Losses and norms of ten iterations of Muon, in every layout."""
    check_losses_and_norms(fsdp(zero), world_size, (*flags, *TEN), fsdp_flags)


@pytest.mark.parametrize(
    ("world_size", "zero", "flags", "fsdp_flags"),
    [
        pytest.param(4, 3, (*PP, TIED), (), id="zero3_tied"),
        slow(4, 1, PP, (), id="zero1"),
        slow(4, 3, INTERLEAVED, (), id="zero3_interleaved"),
        slow(8, 2, (*PP, *EP), HSDP, id="hsdp_ep2"),
        slow(4, 3, NO_MATRIX, HFSDP, id="hfsdp_stage_without_layer"),
    ],
)
def test_stages_of_adam_train_like_ddp(world_size, zero, flags, fsdp_flags):
    """The repairs are those of Megatron-FSDP, not of Muon."""
    check_losses_and_norms(fsdp(zero), world_size, (*flags, *ADAM), fsdp_flags)


@pytest.mark.slow
def test_stages_in_bf16_train_like_ddp():
    """Weights and what stages send in bf16, gradients in fp32 as under DDP."""
    flags = (*PP, *BF16, "--train-iters", "10")
    tolerances = (BF16_TOLERANCE, 100 * BF16_TOLERANCE)
    check_losses_and_norms(fsdp(3), 4, flags, FP32_GRADIENTS, tolerances)


def check_flags(world_size: int, base: tuple, groups: list[str], least: float):
    """Compare a run with all groups of flags at once with upstream's.

    Upstream's losses change where any group is left out, so a flag that Megatron-FSDP ignored would
    be found.
    """
    every = [flag for group in groups for flag in group.split()]
    check_losses(world_size, 3, (*base, *every))
    expected = reference(*base, *every, compared_with=world_size).losses
    for left_out in groups:
        others = [flag for group in groups if group != left_out for flag in group.split()]
        without = reference(*base, *others, compared_with=world_size).losses
        assert max(relative_differences(without, expected)) > least, left_out


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
