# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Upstream's saves without the repairs: they fail, or hang."""

import functools
from typing import Any

import pytest
from helpers.checkpoint_runs import SCHEDULE
from helpers.ranks import launch, run_ranks
from helpers.repairs import without
from helpers.toy_gpt import BF16, EP, ZERO, fsdp_toy_gpt

pytestmark = pytest.mark.ranks

Z3 = ZERO[3]
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


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
def test_adam_with_empty_shards_saves(tmp_path):
    """Without the repair, ranks come with different sets of tensors to collectives over them."""
    flags = [*EP, *BF16, *SCHEDULE, "--exit-interval", "5", "--optimizer", "adam"]
    launch(4, fsdp_toy_gpt(Z3, *flags, "--save", str(tmp_path))).check()
    assert (tmp_path / "iter_0000005" / ".metadata").exists()


def _split_latent_attention() -> list[Any]:
    """Split states by a stand-in for ``handle_mla_down_proj_in_state_dict`` of later releases."""
    import torch
    from helpers.toy_fsdp import build_model

    from megatron_muon.mcore.checkpoint_repairs import split_every_state

    def handler(model: Any, weights: dict[str, Any], states: Any) -> tuple[dict[str, Any], None]:
        assert states is None, "its own way knows Adam's states alone"
        parts = {}
        for name, tensor in weights.items():
            rows = model.get_parameter(name).megatron_fsdp_slice
            assert rows.stop - rows.start == tensor._local_tensor.numel()
            parts |= {name.replace("_qkv", f"_{part}"): (part, tensor) for part in ("q", "kv")}
        return parts, None

    model = build_model()
    param = dict(model.module.param_and_grad_buffer.optimizer_named_parameters)[QKV]
    states = {QKV: {"momentum_buffer": torch.zeros_like(param.data), "step": 3}}
    _, split = split_every_state(handler)(model, {QKV: param.data}, {"state": states, "groups": 1})
    parts = {name: [*of_part] for name, of_part in split["state"].items()}
    return [parts, split["groups"]]


def test_every_state_of_fused_latent_attention_is_split():
    """Later releases have the handler; it would miss Adam's states and fail."""
    kinds = ["step", "momentum_buffer"]
    parts = {QKV.replace("_qkv", part): kinds for part in ("_q", "_kv")}
    assert run_ranks(2, _split_latent_attention).check().results == [[parts, 1]] * 2
