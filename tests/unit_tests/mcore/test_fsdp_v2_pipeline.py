# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages under Megatron-FSDP v2, on a checkout of Megatron-LM's main.

``scripts/check_compat.py --megatron DIR`` runs this file. The reference is DDP with the same
stages, as in test_pipeline.py, and so are the tolerances.
"""

import functools

import pytest
from helpers.checkpoint_runs import (
    SAVED_AT,
    assert_resumes,
    assert_same,
    gathered,
    resumed_run,
    saved_run,
)
from helpers.fsdp_v2 import V2, needs_flags, v2_toy_gpt, without
from helpers.ranks import launch
from helpers.toy_gpt import (
    BF16,
    EP,
    INTERLEAVED,
    MOE,
    NO_MATRIX,
    PP,
    TIED,
    TP,
    ZERO,
    assert_trains_alike,
    fsdp_toy_gpt,
    microbatches,
    relative_differences,
    toy_gpt,
    train,
)

pytestmark = [pytest.mark.ranks, needs_flags]

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
HIGH = ("--muon-fp32-matmul-prec", "high")
TEN = (*HIGH, "--train-iters", "10")
ADAM = ("--optimizer", "adam", "--lr", "1e-3", "--train-iters", "10")
# Dense layers in the first stage, experts in the second.
EXPERTS_IN_ONE = (*PP, *EP, "--moe-layer-freq", "[0,1]")
# The root of the second stage has no parameter of its own.
THREE = ("--pipeline-model-parallel-size", "3", "--num-layers", "3")
CLIP = ("--qk-clip", "--qk-clip-threshold", "0.05")
LOSS_TOLERANCE, NORM_TOLERANCE, BF16_TOLERANCE = 5e-7, 1e-6, 1.5e-4


def check(
    world_size: int,
    flags: tuple[str, ...],
    tolerances: tuple[float, float] = (LOSS_TOLERANCE, NORM_TOLERANCE),
) -> None:
    """Compare losses and gradient norms of every iteration with DDP's."""
    found, expected = (train(world_size, gpt(*flags), 2) for gpt in (v2_toy_gpt, toy_gpt))
    assert_trains_alike(found, expected, tolerances)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(4, PP, id="two_stages"),
        slow(6, (*THREE, TIED), id="three_stages_tied"),
        slow(6, PP, id="three_ranks_per_stage"),
        slow(2, (*PP, TIED), id="one_rank_per_stage_tied"),
        pytest.param(4, (*PP, TIED), id="tied"),
        pytest.param(4, (*PP, *EP), id="ep2"),
        slow(4, EXPERTS_IN_ONE, id="experts_in_one_ep2"),
        slow(4, NO_MATRIX, id="stage_without_matrix"),
        pytest.param(4, (*INTERLEAVED, TIED), id="interleaved_tied"),
        slow(4, (*INTERLEAVED, *MOE), id="interleaved_experts"),
    ],
)
def test_stages_train_like_ddp(world_size, flags):
    """Losses and norms of ten iterations of Muon."""
    check(world_size, (*flags, *TEN))


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        slow(4, PP, id="two_stages"),
        pytest.param(4, (*PP, TIED), id="tied"),
        slow(4, EXPERTS_IN_ONE, id="experts_in_one_ep2"),
        slow(4, INTERLEAVED, id="interleaved"),
    ],
)
def test_adam_trains_like_ddp(world_size, flags):
    """Its norm is that of all stages, in which a tied embedding counts once."""
    check(world_size, (*flags, *ADAM))


@pytest.mark.slow
def test_bf16_trains_like_ddp():
    """Gradients are in bf16, too, which norms show more than losses."""
    flags = (*PP, TIED, *BF16, "--train-iters", "10")
    check(4, flags, (BF16_TOLERANCE, 10 * BF16_TOLERANCE))


@pytest.mark.slow
def test_qk_clip_is_that_of_v1():
    """Each stage clips its layers, by logits of its own."""
    flags = (*PP, *HIGH, *CLIP)
    found = train(4, v2_toy_gpt(*flags), 2).losses
    expected = train(4, fsdp_toy_gpt(ZERO[3], *flags), 2).losses
    assert max(relative_differences(found, expected)) <= LOSS_TOLERANCE


@pytest.mark.parametrize(
    ("repair", "flags", "said"),
    [
        pytest.param(
            *("FullyShardedDataParallelV2.__init__", PP, "BACKWARD -> Phase.BACKWARD"), id="count"
        ),
        slow(
            *("FullyShardedDataParallelV2._validate_config", PP),
            "MFSDP v2 does not currently support: tensor_model_parallel_size=1, pipeline_",
            id="stages",
        ),
        slow(
            *("FullyShardedOptimizer._validate_config", INTERLEAVED),
            "MFSDP v2 currently supports exactly one model chunk.",
            id="chunks",
        ),
    ],
)
def test_stages_fail_without_the_repair(repair, flags, said):
    """What upstream does, with every optimizer."""
    run = launch(
        2,
        v2_toy_gpt(*flags, *ADAM, *microbatches(2, 2, flags)),
        before=functools.partial(without, (repair,)),
        timeout_s=60.0,
    )
    assert any(run.exit_codes)
    assert any(said in output for output in run.outputs)


def test_tensor_parallelism_with_stages_stays_refused():
    """In upstream's words, which count stages as one."""
    run = launch(4, v2_toy_gpt(*PP, *TP))
    assert all(run.exit_codes) and run.history == []
    assert any("MFSDP v2 does not currently support: tensor_model" in out for out in run.outputs)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(4, (*PP, TIED, *HIGH), id="tied"),
        slow(4, (*EXPERTS_IN_ONE, "--swiglu", *BF16), id="experts_in_one_ep2_gated_bf16"),
    ],
)
def test_resumed_run_is_the_run_that_never_stopped(world_size, flags, tmp_path):
    """Losses, parameters and state of the iterations after, on every rank, bit for bit."""
    flags = (ZERO[3], *V2, *flags)
    first = saved_run(world_size, tmp_path / "saved", *flags)
    assert_resumes(first, tmp_path / "saved", tmp_path / "resumed", world_size, *flags)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, (*V2, *PP)), (2, V2), id="two_stages_to_one"),
        slow((2, V2), (4, (*V2, *PP)), id="one_stage_to_two"),
        slow((4, (*V2, *PP)), (4, PP), id="to_v1"),
        slow((4, PP), (4, (*V2, *PP)), id="of_v1"),
    ],
)
def test_checkpoint_loads_with_other_stages_and_in_the_other_version(before, after, tmp_path):
    """Parameters and state are the saved ones, bit for bit, under the same names."""
    (world_size, flags), (new_world_size, new_flags) = before, after
    batch = ("--global-batch-size", "8", "--micro-batch-size", "2")
    first = saved_run(world_size, tmp_path / "saved", ZERO[3], *flags, *HIGH, *batch)
    resumed = resumed_run(
        *(new_world_size, tmp_path / "saved", tmp_path / "resumed", ZERO[3]),
        *(*new_flags, *HIGH, *batch),
    ).check()
    assert_same(
        gathered(tmp_path / "resumed", new_world_size), gathered(tmp_path / "saved", world_size)
    )
    assert max(relative_differences(resumed.losses, first.losses[SAVED_AT:])) <= 4e-5
