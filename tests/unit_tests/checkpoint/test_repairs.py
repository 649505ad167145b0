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


def _split_by_a_stand_in() -> dict[str, Any]:
    """Split states of a parameter with what stands for a handler of a later release."""
    import torch
    from helpers.toy_fsdp import build_model
    from torch.distributed.tensor import DTensor

    from megatron_muon.mcore.checkpoint_repairs import split_every_state

    asked = []

    def handler(model: Any, model_state: dict[str, Any], optimizer_state: Any) -> tuple:
        assert optimizer_state is None, "its own way knows Adam's states alone"
        found = {}
        for name, tensor in model_state.items():
            if ".linear_qkv_down_proj." in name:
                elements = model.get_parameter(QKV).megatron_fsdp_slice
                asked.append(elements.stop - elements.start == tensor._local_tensor.numel())
                for part in ("q", "kv"):
                    found[name.replace("_qkv_", f"_{part}_")] = (part, tensor)
            else:
                found[name] = tensor
        return found, None

    model = build_model()
    param = dict(model.module.param_and_grad_buffer.optimizer_named_parameters)[QKV]
    momentum = torch.zeros_like(param.data)
    assert isinstance(momentum, DTensor)
    fused, plain = "layer.linear_qkv_down_proj.weight", {"momentum_buffer": momentum}
    # What is found of a parameter goes by its name: this stands for one that the toy has.
    state = {fused: {**plain, "step": 3}, "other": plain}
    _, split = split_every_state(handler)(model, {}, {"state": state, "groups": 1})
    return {
        "names": {name: sorted(states) for name, states in split["state"].items()},
        "parts": [split["state"][fused.replace("_qkv_", f"_{p}_")]["momentum_buffer"][0]
                  for p in ("q", "kv")],
        "groups": split["groups"],
        "asked": asked,
    }  # fmt: skip


def test_every_state_of_fused_latent_attention_is_split():
    """Later releases have the handler; it would miss Adam's states and fail."""
    for found in run_ranks(2, _split_by_a_stand_in).check().results:
        momentum = ["momentum_buffer"]
        assert found["names"] == {
            "layer.linear_q_down_proj.weight": [*momentum, "step"],
            "layer.linear_kv_down_proj.weight": [*momentum, "step"],
            "other": momentum,
        }
        assert found["parts"] == ["q", "kv"] and found["groups"] == 1 and found["asked"] == [True]
