# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP v2 through Megatron's flags, on a checkout of Megatron-LM's main.

``scripts/check_compat.py --megatron DIR`` runs this file. ``helpers/parity.py`` has the tolerances;
gradients of bf16 weights are reduced in bf16 by v2, whatever their dtype in buffers.
"""

import functools
from typing import Any

import pytest
from helpers.checkpoint_runs import (
    SAVED_AT,
    SCHEDULE,
    assert_resumes,
    assert_same,
    gathered,
    kill_in_save,
    loadable,
    resumed_run,
    saved_run,
)
from helpers.fsdp_v2 import V2, needs_flags, v2_toy_gpt, without
from helpers.parity import (
    ADAM,
    BF16_TOLERANCE,
    HIGH,
    HIGH_TOLERANCE,
    TEN,
    check_losses_and_norms,
    norms,
    slow,
)
from helpers.ranks import launch
from helpers.toy_gpt import (
    BF16,
    EP,
    HSDP,
    INTERLEAVED,
    MOE,
    NO_MATRIX,
    PP,
    TIED,
    TP,
    ZERO,
    fsdp_toy_gpt,
    microbatches,
    reference,
    relative_differences,
    toy_gpt,
    train,
)

pytestmark = [pytest.mark.ranks, needs_flags]

V2_HIGH = (*V2, *HIGH)
EP_BF16 = (*EP, *BF16)
# Dense layers in the first stage, experts in the second.
EP_IN_ONE = (*PP, *EP, "--moe-layer-freq", "[0,1]")
# The root of the second stage has no parameter of its own.
THREE = ("--pipeline-model-parallel-size", "3", "--num-layers", "3")
# Iterations follow; the schedule is that of any number of them.
SHORT = ("--lr-warmup-iters", "0", "--lr-decay-iters", "20", "--train-iters")
# Of fp32 sums in another order, as in test_gradient_repairs.py.
NORM_TOLERANCE = 1e-5
THREE_OF_ADAM = ("--optimizer", "adam", "--lr", "1e-3", *SHORT, "3")
COUNTED_TWICE = ("FullyShardedOptimizer.__init__",)
REFUSED = [
    (("--tensor-model-parallel-size", "2"), "MFSDP v2 does not currently support: tensor_model"),
    (("--use-distributed-optimizer",), "not compatible with --use-distributed-optimizer"),
    (("--data-parallel-sharding-strategy", "optim"), "MFSDP v2 requires data_parallel_sharding"),
    (("--calculate-per-token-loss",), "MFSDP v2 does not currently support per-token loss"),
    (("--fp16",), "emerging optimizers have no loss scaling"),
]


@pytest.mark.parametrize(
    ("world_size", "flags", "tolerance", "num_microbatches"),
    [
        pytest.param(2, HIGH, HIGH_TOLERANCE, 2, id="fp32"),
        pytest.param(3, HIGH, HIGH_TOLERANCE, 1, id="fp32_three_ranks"),
        pytest.param(2, (*HIGH, *EP), HIGH_TOLERANCE, 1, id="ep2"),
        pytest.param(4, (*HIGH, *EP), HIGH_TOLERANCE, 1, id="ep2_dp4"),
        pytest.param(2, BF16, BF16_TOLERANCE, 1, id="bf16"),
        pytest.param(2, (*HIGH, "--muon-split-glu"), HIGH_TOLERANCE, 1, id="glu"),
    ],
)
def test_muon_trains_like_ddp(world_size, flags, tolerance, num_microbatches):
    """Losses and gradient norms of ten iterations, with clipping."""
    run = train(world_size, v2_toy_gpt(*TEN[2:], *flags), num_microbatches)
    expected = reference(
        *TEN[2:], *flags, compared_with=world_size, num_microbatches=num_microbatches
    )
    differences = relative_differences(run.losses, expected.losses)
    print(f"largest relative difference: {max(differences):.1e}")
    assert len(differences) == 10 and run.losses[-1] < run.losses[0] - 0.2
    assert max(differences) <= tolerance, differences
    of_norms = relative_differences(norms(run), norms(expected))
    print(f"of norms: {max(of_norms):.1e}")
    # Norms follow weights, whose rounding grows with the iterations.
    assert of_norms[0] <= (1e-3 if tolerance == BF16_TOLERANCE else NORM_TOLERANCE), of_norms
    assert max(of_norms) <= 1e-2


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(4, PP, id="two_stages"),
        slow(6, (*THREE, TIED), id="three_stages_tied"),
        slow(6, PP, id="three_ranks_per_stage"),
        slow(2, (*PP, TIED), id="one_rank_per_stage_tied"),
        pytest.param(4, (*PP, TIED), id="tied"),
        pytest.param(4, (*PP, *EP), id="ep2"),
        slow(4, EP_IN_ONE, id="experts_in_one_ep2"),
        slow(4, NO_MATRIX, id="stage_without_matrix"),
        pytest.param(4, (*INTERLEAVED, TIED), id="interleaved_tied"),
        slow(4, (*INTERLEAVED, *MOE), id="interleaved_experts"),
    ],
)
def test_stages_train_like_ddp(world_size, flags):
    """Losses and norms of ten iterations of Muon."""
    check_losses_and_norms(v2_toy_gpt, world_size, (*flags, *TEN))


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        slow(4, PP, id="two_stages"),
        pytest.param(4, (*PP, TIED), id="tied"),
        slow(4, EP_IN_ONE, id="experts_in_one_ep2"),
        slow(4, INTERLEAVED, id="interleaved"),
    ],
)
def test_stages_of_adam_train_like_ddp(world_size, flags):
    """Its norm is that of all stages, in which a tied embedding counts once."""
    check_losses_and_norms(v2_toy_gpt, world_size, (*flags, *ADAM))


@pytest.mark.slow
def test_stages_in_bf16_train_like_ddp():
    """Gradients are in bf16, too, which norms show more than losses."""
    flags = (*PP, TIED, *BF16, "--train-iters", "10")
    tolerances = (BF16_TOLERANCE, 10 * BF16_TOLERANCE)
    check_losses_and_norms(v2_toy_gpt, 4, flags, (), tolerances)


def test_norm_is_that_of_all_shards_where_instances_hold_different_ones():
    """At d98e8a64 the wrapper ignores HSDP's flag, and shards over all ranks all the same.

    A norm over one instance was that of half the gradients.
    """
    flags = (*HIGH, *SHORT, "2")
    run = train(2, v2_toy_gpt(*flags, *HSDP))
    assert norms(run) == pytest.approx(norms(train(2, v2_toy_gpt(*flags))), rel=NORM_TOLERANCE)


def check_is_that_of_v1(world_size: int, *flags: str) -> list[float]:
    """Compare losses with those of version 1, and return them."""
    num_microbatches = 2 if PP[0] in flags else 1
    found = train(world_size, v2_toy_gpt(*HIGH, *flags), num_microbatches).losses
    expected = train(world_size, fsdp_toy_gpt(ZERO[3], *HIGH, *flags), num_microbatches).losses
    assert max(relative_differences(found, expected)) <= HIGH_TOLERANCE
    return found


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_adaptive_methods_are_those_of_v1(method):
    """The same code on rows that are cut elsewhere."""
    check_is_that_of_v1(2, "--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", method)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_qk_clip_is_that_of_ddp(optimizer):
    """Main weights are clipped between the step and the refresh of compute weights."""
    flags = ("--optimizer", optimizer)
    found = check_is_that_of_v1(2, *flags, "--qk-clip", "--qk-clip-threshold", "0.005")
    unclipped = train(2, v2_toy_gpt(*HIGH, *flags)).losses
    assert max(relative_differences(found, unclipped)) > 100 * HIGH_TOLERANCE


@pytest.mark.slow
def test_qk_clip_of_stages_is_that_of_v1():
    """Each stage clips its layers, by logits of its own."""
    check_is_that_of_v1(4, *PP, "--qk-clip", "--qk-clip-threshold", "0.05")


@pytest.mark.parametrize("flags", [(), EP], ids=["dense", "ep2"])
def test_norm_and_zeros_of_adam_are_counted_once(flags):
    """Upstream's norm is sqrt(dp) times DDP's, and with experts it asserts that there is one mesh.

    So clipping took gradients for larger than they were.
    """
    asked = (*THREE_OF_ADAM, "--log-num-zeros-in-grad", *flags)
    batch = ("--global-batch-size", "4", "--micro-batch-size", "2")
    run = launch(2, v2_toy_gpt(*asked, *batch)).check()
    expected = launch(2, toy_gpt(*asked, *batch)).check()
    assert norms(run) == pytest.approx(norms(expected), rel=NORM_TOLERANCE)
    counted = [record["num_zeros"] for record in run.history]
    assert counted == [record["num_zeros"] for record in expected.history]
    broken = launch(2, v2_toy_gpt(*asked, *batch), before=functools.partial(without, COUNTED_TWICE))
    if flags:
        assert all(broken.exit_codes) and "AssertionError" in broken.outputs[0]
    else:
        factor = broken.check().history[0]["grad_norm"] / norms(expected)[0]
        assert factor == pytest.approx(2**0.5, rel=NORM_TOLERANCE)


def _leave_one_unused() -> None:
    """Add a parameter to the layers that no forward pass uses."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.unused = torch.nn.Parameter(torch.ones(4, 4))

    TransformerLayer.__init__ = __init__


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_unused_parameter_is_named_in_the_first_backward_pass(optimizer):
    """Upstream reduced no gradient of its layer, and raised that a phase is invalid."""
    flags = v2_toy_gpt("--optimizer", optimizer, "--global-batch-size", "8")
    run = launch(2, flags, before=_leave_one_unused)
    assert run.exit_codes == [1, 1] and run.history == []
    assert "decoder.layers.0.unused, decoder.layers.1.unused: expected a gr" in run.outputs[0]


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


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_the_wrapper_of_v2_refuses_stays_refused(flags, message):
    """In upstream's words, or in those of this package where v1 is refused too."""
    run = launch(2, v2_toy_gpt(*flags))
    assert all(run.exit_codes) and run.history == []
    assert message in run.outputs[0]


def test_tensor_parallelism_with_stages_stays_refused():
    """In upstream's words, which count stages as one."""
    run = launch(4, v2_toy_gpt(*PP, *TP))
    assert all(run.exit_codes) and run.history == []
    assert any("MFSDP v2 does not currently support: tensor_model" in out for out in run.outputs)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, HIGH, id="fp32"),
        pytest.param(4, EP_BF16, id="ep2_bf16"),
        pytest.param(4, (*PP, TIED, *HIGH), id="tied"),
        slow(4, (*EP_IN_ONE, "--swiglu", *BF16), id="experts_in_one_ep2_gated_bf16"),
    ],
)
def test_resumed_run_is_the_run_that_never_stopped(world_size, flags, tmp_path):
    """Losses, parameters and state of the iterations after, on every rank, bit for bit."""
    flags = (ZERO[3], *V2, *flags)
    first = saved_run(world_size, tmp_path / "saved", *flags)
    assert_resumes(first, tmp_path / "saved", tmp_path / "resumed", world_size, *flags)


# Two stages, of fewer samples an iteration.
STAGES = (*PP, *HIGH)


@pytest.mark.parametrize(
    ("before", "after", "num_samples"),
    [
        pytest.param((2, V2_HIGH), (2, HIGH), 12, id="v2_to_v1"),
        pytest.param((2, HIGH), (2, V2_HIGH), 12, id="v1_to_v2"),
        pytest.param((2, V2_HIGH), (3, V2_HIGH), 12, id="v2_to_3_ranks"),
        pytest.param((4, (*V2, *EP_BF16)), (2, EP_BF16), 12, id="v2_ep2_bf16_to_v1"),
        pytest.param((2, EP_BF16), (4, (*V2, *EP_BF16)), 12, id="v1_ep2_bf16_to_v2"),
        pytest.param((4, (*V2, *STAGES)), (2, V2_HIGH), 8, id="two_stages_to_one"),
        slow((2, V2_HIGH), (4, (*V2, *STAGES)), 8, id="one_stage_to_two"),
        slow((4, (*V2, *STAGES)), (4, STAGES), 8, id="stages_to_v1"),
        slow((4, STAGES), (4, (*V2, *STAGES)), 8, id="stages_of_v1"),
    ],
)
def test_checkpoint_loads_in_the_other_version_and_on_other_ranks(
    before, after, num_samples, tmp_path
):
    """Parameters and state are the saved ones, bit for bit, under the same names."""
    batches = []
    for world_size, flags in (before, after):
        # Several microbatches with stages.
        size = 2 if num_samples == 8 else num_samples // world_size
        batch = ("--global-batch-size", str(num_samples), "--micro-batch-size", str(size))
        batches.append((*flags, *batch))
    first = saved_run(before[0], tmp_path / "saved", ZERO[3], *batches[0])
    resumed = resumed_run(
        after[0], tmp_path / "saved", tmp_path / "resumed", ZERO[3], *batches[1]
    ).check()
    assert_same(gathered(tmp_path / "resumed", after[0]), gathered(tmp_path / "saved", before[0]))
    # As in test_resume.py: with experts a token may be routed elsewhere.
    tolerance = 4e-3 if EP[0] in before[1] else 4e-5
    assert max(relative_differences(resumed.losses, first.losses[SAVED_AT:])) <= tolerance


def test_weights_load_without_optimizer_state(tmp_path):
    """Compute weights follow main weights at once, also in bf16: the first loss is the same."""
    flags = v2_toy_gpt(*BF16, *SCHEDULE)
    first = launch(2, [*flags, "--no-save-optim", "--save", str(tmp_path)]).check()
    load = ("--load", str(tmp_path), "--ckpt-step", str(SAVED_AT), "--no-load-optim")
    resumed = launch(2, [*flags, *load]).check()
    assert resumed.losses[0] == first.losses[SAVED_AT]
    refused = launch(2, [*flags, *load[:-1]])
    assert refused.exit_codes == [1, 1] and "Nothing was loaded." in refused.outputs[0]


def test_save_that_is_killed_leaves_a_checkpoint(tmp_path):
    """SIGKILL in the second save: the tracker points to a sound checkpoint, and it loads."""
    saves = (*SHORT, "8", "--save", str(tmp_path), "--save-interval", "3")
    killed = launch(2, v2_toy_gpt(*saves), before=functools.partial(kill_in_save, 1, 0.5))
    assert any(killed.exit_codes)
    iteration = loadable(tmp_path)
    assert iteration in (3, 6)
    load = (*SHORT, "8", "--load", str(tmp_path))
    assert len(launch(2, v2_toy_gpt(*load)).check().losses) == 8 - iteration


def test_damaged_checkpoint_is_refused(tmp_path):
    """Before anything is loaded, on all ranks."""
    saves = (*SHORT, "2", "--save", str(tmp_path), "--save-interval", "2")
    launch(2, v2_toy_gpt(*saves)).check()
    damaged = max(tmp_path.glob("iter_*/__*.distcp"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    run = launch(2, v2_toy_gpt(*SHORT, "3", "--load", str(tmp_path)))
    assert run.exit_codes == [1, 1] and "Nothing was loaded." in run.outputs[0]
