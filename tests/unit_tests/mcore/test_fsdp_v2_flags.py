# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP v2 through Megatron's flags, on a checkout of Megatron-LM's main.

``scripts/check_compat.py --megatron DIR`` runs this file. Tolerances are those of test_parity.py;
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
from helpers.ranks import Run, launch
from helpers.toy_gpt import (
    BF16,
    EP,
    HSDP,
    ZERO,
    fsdp_toy_gpt,
    reference,
    relative_differences,
    toy_gpt,
    train,
)

pytestmark = [pytest.mark.ranks, needs_flags]

HIGH = ("--muon-fp32-matmul-prec", "high")
HIGH_TOLERANCE, BF16_TOLERANCE = 5e-7, 1.5e-4
TEN = ("--train-iters", "10")
# Iterations follow; the schedule is that of any number of them.
SHORT = ("--lr-warmup-iters", "0", "--lr-decay-iters", "20", "--train-iters")
# Of fp32 sums in another order, as in test_gradient_repairs.py.
NORM_TOLERANCE = 1e-5


def norms(run: Run) -> list[float]:
    """Return the gradient norm of every iteration."""
    return [record["grad_norm"] for record in run.history]


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
    run = train(world_size, v2_toy_gpt(*TEN, *flags), num_microbatches)
    expected = reference(*TEN, *flags, compared_with=world_size, num_microbatches=num_microbatches)
    differences = relative_differences(run.losses, expected.losses)
    print(f"largest relative difference: {max(differences):.1e}")
    assert len(differences) == 10 and run.losses[-1] < run.losses[0] - 0.2
    assert max(differences) <= tolerance, differences
    of_norms = relative_differences(norms(run), norms(expected))
    print(f"of norms: {max(of_norms):.1e}")
    # Norms follow weights, whose rounding grows with the iterations.
    assert of_norms[0] <= (1e-3 if tolerance == BF16_TOLERANCE else NORM_TOLERANCE), of_norms
    assert max(of_norms) <= 1e-2


def test_norm_is_that_of_all_shards_where_instances_hold_different_ones():
    """At d98e8a64 the wrapper ignores HSDP's flag, and shards over all ranks all the same.

    A norm over one instance was that of half the gradients.
    """
    flags = (*HIGH, *SHORT, "2")
    run = train(2, v2_toy_gpt(*flags, *HSDP))
    assert norms(run) == pytest.approx(norms(train(2, v2_toy_gpt(*flags))), rel=NORM_TOLERANCE)


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_adaptive_methods_are_those_of_v1(method):
    """The same code on rows that are cut elsewhere."""
    flags = (*HIGH, "--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", method)
    found = train(2, v2_toy_gpt(*flags)).losses
    expected = train(2, fsdp_toy_gpt(ZERO[3], *flags)).losses
    assert max(relative_differences(found, expected)) <= HIGH_TOLERANCE


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_qk_clip_is_that_of_ddp(optimizer):
    """Main weights are clipped between the step and the refresh of compute weights."""
    clip = ("--qk-clip", "--qk-clip-threshold", "0.005")
    flags = (*HIGH, "--optimizer", optimizer)
    found = train(2, v2_toy_gpt(*flags, *clip)).losses
    expected = train(2, fsdp_toy_gpt(ZERO[3], *flags, *clip)).losses
    assert max(relative_differences(found, expected)) <= HIGH_TOLERANCE
    unclipped = train(2, v2_toy_gpt(*flags)).losses
    assert max(relative_differences(found, unclipped)) > 100 * HIGH_TOLERANCE


ADAM = ("--optimizer", "adam", "--lr", "1e-3", "--lr-warmup-iters", "0", "--train-iters", "3")
COUNTED_TWICE = ("FullyShardedOptimizer.__init__",)


@pytest.mark.parametrize("flags", [(), EP], ids=["dense", "ep2"])
def test_norm_and_zeros_of_adam_are_counted_once(flags):
    """Upstream's norm is sqrt(dp) times DDP's, and with experts it asserts that there is one mesh.

    So clipping took gradients for larger than they were.
    """
    asked = (*ADAM, "--log-num-zeros-in-grad", *flags)
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


REFUSED = [
    (("--tensor-model-parallel-size", "2"), "MFSDP v2 does not currently support: tensor_model"),
    (("--use-distributed-optimizer",), "not compatible with --use-distributed-optimizer"),
    (("--data-parallel-sharding-strategy", "optim"), "MFSDP v2 requires data_parallel_sharding"),
    (("--calculate-per-token-loss",), "MFSDP v2 does not currently support per-token loss"),
    (("--fp16",), "emerging optimizers have no loss scaling"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_the_wrapper_of_v2_refuses_stays_refused(flags, message):
    """In upstream's words, or in those of this package where v1 is refused too."""
    run = launch(2, v2_toy_gpt(*flags))
    assert all(run.exit_codes) and run.history == []
    assert message in run.outputs[0]


V2_HIGH = (*V2, *HIGH)
EP_BF16 = (*EP, *BF16)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [pytest.param(2, HIGH, id="fp32"), pytest.param(4, EP_BF16, id="ep2_bf16")],
)
def test_resumed_run_is_the_run_that_never_stopped(world_size, flags, tmp_path):
    """Losses, parameters and state of the iterations after, on every rank, bit for bit."""
    flags = (ZERO[3], *V2, *flags)
    first = saved_run(world_size, tmp_path / "saved", *flags)
    assert_resumes(first, tmp_path / "saved", tmp_path / "resumed", world_size, *flags)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, V2_HIGH), (2, HIGH), id="v2_to_v1"),
        pytest.param((2, HIGH), (2, V2_HIGH), id="v1_to_v2"),
        pytest.param((2, V2_HIGH), (3, V2_HIGH), id="v2_to_3_ranks"),
        pytest.param((4, (*V2, *EP_BF16)), (2, EP_BF16), id="v2_ep2_bf16_to_v1"),
        pytest.param((2, EP_BF16), (4, (*V2, *EP_BF16)), id="v1_ep2_bf16_to_v2"),
    ],
)
def test_checkpoint_loads_in_the_other_version_and_on_other_ranks(before, after, tmp_path):
    """Parameters and state are the saved ones, bit for bit, under the same names."""
    (world_size, flags), (new_world_size, new_flags) = before, after
    size = ("--global-batch-size", "12", "--micro-batch-size")
    first = saved_run(world_size, tmp_path / "saved", ZERO[3], *flags, *size, str(12 // world_size))
    resumed = resumed_run(
        *(new_world_size, tmp_path / "saved", tmp_path / "resumed", ZERO[3]),
        *(*new_flags, *size, str(12 // new_world_size)),
    ).check()
    assert_same(
        gathered(tmp_path / "resumed", new_world_size), gathered(tmp_path / "saved", world_size)
    )
    # As in test_resume.py: with experts a token may be routed elsewhere.
    tolerance = 4e-3 if EP[0] in flags else 4e-5
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
