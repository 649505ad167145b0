# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with and without Transformer Engine, whose Adam keeps its counter elsewhere."""

import functools

import pytest
import torch
from helpers.fused_adam import watch_adam
from helpers.ranks import launch
from helpers.toy_gpt import fsdp_toy_gpt

pytestmark = pytest.mark.ranks

SAVED_AT, LAST, NUM_RANKS = 3, 5, 2
SCHEDULE = (f"--train-iters {LAST} --lr-decay-iters 20 --save-interval {SAVED_AT}").split()
ADAM = ("--optimizer", "adam", "--lr", "1e-3", "--min-lr", "1e-4")


def _run(is_fused, folder, *flags):
    """Train with one of the two Adams, which leaves what it held at ``SAVED_AT`` in a folder."""
    folder.mkdir()
    before = functools.partial(watch_adam, is_fused, SAVED_AT, str(folder))
    flags = fsdp_toy_gpt("optim_grads_params", *SCHEDULE, *flags)
    run = launch(NUM_RANKS, flags, before=before).check()
    return run, [torch.load(folder / f"adam_{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize(
    ("saves_fused", "flags"),
    [
        pytest.param(False, (), id="torch_to_fused"),
        pytest.param(True, (), id="fused_to_torch", marks=pytest.mark.slow),
        pytest.param(False, ADAM, id="adam_alone_torch_to_fused", marks=pytest.mark.slow),
        pytest.param(True, ADAM, id="adam_alone_fused_to_torch", marks=pytest.mark.slow),
    ],
)
def test_one_adam_continues_what_the_other_one_saved(tmp_path, saves_fused, flags):
    """A run on CPU ranks could not resume one of GPUs, nor the reverse: the counter was missing.

    Counter and states are those that were saved. Losses of the iterations that follow are those of
    the run that never stopped, to the rounding of two implementations of Adam.
    """
    save = ("--save", str(tmp_path / "saved"))
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step", str(SAVED_AT))
    first, saved = _run(saves_fused, tmp_path / "first", *flags, *save)
    second, loaded = _run(not saves_fused, tmp_path / "second", *flags, *load)
    for before, after in zip(saved, loaded, strict=True):
        assert set(before["counters"]) == set(after["counters"]) == {float(SAVED_AT)}
        assert len(before["states"]) == len(after["states"]) > 0
        assert all(map(torch.equal, before["states"], after["states"]))
    assert [record["iteration"] for record in second.history] == [SAVED_AT + 1, LAST]
    # Two steps, each of which rounds weights once more than the other Adam: 1e-7 of a loss or so.
    assert second.losses == pytest.approx(first.losses[SAVED_AT:], rel=1e-5)
