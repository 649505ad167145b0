# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Upstream's saves without the repairs: they fail, or hang."""

import functools

import pytest
from helpers.checkpoint_runs import SCHEDULE
from helpers.ranks import launch
from helpers.repairs import without
from helpers.toy_gpt import BF16, EP, ZERO, fsdp_toy_gpt

pytestmark = pytest.mark.ranks

Z3 = ZERO[3]


@pytest.mark.parametrize(
    ("attribute", "sharding", "flags"),
    [
        pytest.param("handle_swiglu_in_state_dict", Z3, BF16, id="muon"),
        pytest.param("handle_swiglu_in_state_dict", Z3, ("--optimizer", "adam"), id="fp32"),
        pytest.param("make_fsdp_dtensor", ZERO[0], BF16, id="no_shard"),
    ],
)
@pytest.mark.slow
def test_save_fails_without_the_repair(attribute, sharding, flags, tmp_path):
    """Gated layers: upstream knows Adam's state, in bf16, sharded."""
    arguments = [*flags, *SCHEDULE, "--save", str(tmp_path), "--exit-interval", "5"]
    run = launch(
        2, fsdp_toy_gpt(sharding, *arguments), before=functools.partial(without, attribute)
    )
    assert 1 in run.exit_codes
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.slow
def test_adams_save_with_empty_shards_hangs_without_the_repair(tmp_path):
    """Ranks come with different sets of tensors to collectives over them."""
    arguments = [*EP, *BF16, *SCHEDULE, "--exit-interval", "5", "--optimizer", "adam"]
    launch(4, fsdp_toy_gpt(Z3, *arguments, "--save", str(tmp_path / "with"))).check()
    broken = launch(
        4,
        fsdp_toy_gpt(Z3, *arguments, "--save", str(tmp_path / "without")),
        before=functools.partial(without, "sharded_param_state_fsdp_dtensor"),
        timeout_s=25,
    )
    assert any(broken.exit_codes)
    assert (tmp_path / "with" / "iter_0000005" / ".metadata").exists()
    assert not (tmp_path / "without" / "iter_0000005" / ".metadata").exists()
