# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP v2 through Megatron's flags, on a checkout of Megatron-LM's main.

``check_compat.py --megatron DIR`` runs this file, and rows of v2 in test_parity.py,
test_pipeline.py and checkpoint/test_resume.py.
"""

import functools
from typing import Any

import pytest
import torch
from helpers.checkpoint_runs import SAVED_AT, SCHEDULE
from helpers.parity import HIGH, HIGH_TOLERANCE, norms
from helpers.ranks import launch
from helpers.repairs import without
from helpers.toy_gpt import (
    BF16,
    EP,
    HSDP,
    PP,
    TP,
    ZERO,
    fsdp_toy_gpt,
    needs_flags,
    relative_differences,
    toy_gpt,
    train,
    v2_toy_gpt,
)

pytestmark = [pytest.mark.ranks, needs_flags]
# Iterations follow; the schedule is that of any number of them.
SHORT = ("--lr-warmup-iters", "0", "--lr-decay-iters", "20", "--train-iters")
# Of fp32 sums in another order, as in test_gradient_repairs.py.
NORM_TOLERANCE = 1e-5
THREE_OF_ADAM = ("--optimizer", "adam", "--lr", "1e-3", *SHORT, "3")


def test_norm_covers_shards_that_differ_between_instances():
    """The norm covers all ranks where the wrapper shards over them despite HSDP's flag."""
    flags = (*HIGH, *SHORT, "2")
    run = train(2, v2_toy_gpt(*flags, *HSDP))
    assert norms(run) == pytest.approx(norms(train(2, v2_toy_gpt(*flags))), rel=NORM_TOLERANCE)


def check_is_that_of_v1(world_size: int, *flags: str) -> list[float]:
    """Compare losses with version 1's, and return them."""
    num_microbatches = 2 if PP[0] in flags else 1
    found = train(world_size, v2_toy_gpt(*HIGH, *flags), num_microbatches).losses
    expected = train(world_size, fsdp_toy_gpt(ZERO[3], *HIGH, *flags), num_microbatches).losses
    assert max(relative_differences(found, expected)) <= HIGH_TOLERANCE
    return found


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_adaptive_methods_are_those_of_v1(method):
    """Adaptive methods have the losses of version 1 on rows that are cut elsewhere."""
    check_is_that_of_v1(2, "--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", method)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_qk_clip_is_that_of_ddp(optimizer):
    """QK-clip has the losses of version 1, and other ones than without it."""
    flags = ("--optimizer", optimizer)
    found = check_is_that_of_v1(2, *flags, "--qk-clip", "--qk-clip-threshold", "0.005")
    unclipped = train(2, v2_toy_gpt(*HIGH, *flags)).losses
    assert max(relative_differences(found, unclipped)) > 100 * HIGH_TOLERANCE


@pytest.mark.slow
def test_qk_clip_of_stages_is_that_of_v1():
    """Each stage clips its layers by its own logits."""
    check_is_that_of_v1(4, *PP, "--qk-clip", "--qk-clip-threshold", "0.05")


@pytest.mark.parametrize("flags", [(), EP], ids=["dense", "ep2"])
def test_norm_and_zeros_of_adam_are_counted_once(flags):
    """The norm of Adam is DDP's, where upstream's is sqrt(dp) times as large or asserts."""
    asked = (*THREE_OF_ADAM, "--log-num-zeros-in-grad", *flags)
    batch = ("--global-batch-size", "4", "--micro-batch-size", "2")
    run = launch(2, v2_toy_gpt(*asked, *batch)).check()
    expected = launch(2, toy_gpt(*asked, *batch)).check()
    assert norms(run) == pytest.approx(norms(expected), rel=NORM_TOLERANCE)
    counted = [record["num_zeros"] for record in run.history]
    assert counted == [record["num_zeros"] for record in expected.history]
    broken = launch(
        2,
        v2_toy_gpt(*asked, *batch),
        before=functools.partial(without, "FullyShardedOptimizer.__init__"),
    )
    if flags:
        assert all(broken.exit_codes) and "AssertionError" in broken.outputs[0]
    else:
        factor = broken.check().history[0]["grad_norm"] / norms(expected)[0]
        assert factor == pytest.approx(2**0.5, rel=NORM_TOLERANCE)


def _leave_one_unused() -> None:
    """Add a parameter to the layers that no forward pass uses."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.unused = torch.nn.Parameter(torch.ones(4, 4))

    TransformerLayer.__init__ = __init__


@pytest.mark.parametrize(
    ("num_samples", "said"),
    [
        (4, "decoder.layers.0.unused: expected a gradient on a shard"),
        # The second microbatch ends before the step that would name it.
        (8, "Phase.BACKWARD -> Phase."),
    ],
)
def test_unused_parameter_ends_the_first_iteration(num_samples, said):
    """An unused parameter, which stops the gradients of its module, ends the first iteration."""
    flags = v2_toy_gpt("--global-batch-size", str(num_samples), "--micro-batch-size", "2")
    run = launch(2, flags, before=_leave_one_unused)
    assert run.exit_codes == [1, 1] and run.history == []
    assert said in run.outputs[0]


@pytest.mark.parametrize(
    ("world_size", "flags", "message"),
    [
        (2, TP, "MFSDP v2 does not currently support: tensor_model"),
        (4, (*PP, *TP), "MFSDP v2 does not currently support: tensor_model"),
        (2, ("--use-distributed-optimizer",), "not compatible with --use-distributed-optimizer"),
        (2, ("--data-parallel-sharding-strategy", "optim"), "requires data_parallel_sharding"),
        (2, ("--calculate-per-token-loss",), "MFSDP v2 does not currently support per-token loss"),
        (2, ("--optimizer-cpu-offload",), "upstream's optimizer of version 2 refuses it"),
        (2, ("--fp16",), "emerging optimizers have no loss scaling"),
    ],
)
def test_what_the_wrapper_of_v2_refuses_stays_refused(world_size, flags, message):
    """Refusals of the wrapper of version 2 stay, in its own words or version 1's."""
    run = launch(world_size, v2_toy_gpt(*flags))
    assert all(run.exit_codes) and run.history == []
    assert any(message in output for output in run.outputs)


def test_weights_load_without_optimizer_state(tmp_path):
    """The next forward pass computes with weights that load without state, also in bf16."""
    flags = v2_toy_gpt(*BF16, *SCHEDULE)
    first = launch(2, [*flags, "--no-save-optim", "--save", str(tmp_path)]).check()
    load = ("--load", str(tmp_path), "--ckpt-step", str(SAVED_AT), "--no-load-optim")
    resumed = launch(2, [*flags, *load]).check()
    assert resumed.losses[0] == first.losses[SAVED_AT]
    refused = launch(2, [*flags, *load[:-1]])
    assert refused.exit_codes == [1, 1] and "Nothing was loaded." in refused.outputs[0]
