# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model go to Muon, by name, shape and kind of module."""

import logging

import torch
from helpers.fsdp2_models import mixed_model

from megatron_muon.fsdp2 import parameter_groups


def test_parameters_are_sorted_by_name_shape_and_module(caplog):
    """What went where is logged, with the matrices that AdamW steps."""
    with caplog.at_level(logging.INFO, logger="megatron_muon"):
        groups = parameter_groups(mixed_model(), elementwise_options={"lr": 0.5})
    names = {group["algorithm"]: group["param_names"] for group in groups}
    assert names["muon"] == ["up.weight", "down.weight"]
    rest = ["embed.weight", "conv.weight", "conv.bias", "up.bias", "gate.weight"]
    assert names["adamw"] == [*rest, "norm.weight", "norm.bias", "head.weight"]
    assert [group.get("lr") for group in groups] == [None if g["algorithm"] == "muon" else 0.5
                                                     for g in groups]  # fmt: skip
    assert "muon: 2 parameters, 192 elements" in caplog.text
    assert (
        "adamw, not muon, steps embed.weight, conv.weight, gate.weight, head.weight" in caplog.text
    )


def test_convolutions_go_to_muon_where_that_is_asked_for():
    """In a group of their own, as matrices of output channels."""
    groups = parameter_groups(mixed_model(), flatten=True, elementwise_names=[r"^up\."])
    of_muon = [group for group in groups if group["algorithm"] == "muon"]
    assert [(g["param_names"], g.get("flatten", False)) for g in of_muon] == [
        (["conv.weight"], True),
        (["gate.weight", "down.weight", "head.weight"], False),
    ]


def test_names_of_real_models_are_sorted_rightly():
    """Of Hugging Face, torchtitan and GPT-2."""
    matrices = ["layers.0.mlp.gate_proj.weight", "attention.output.dense.weight", "h.0.c.weight",
                "layers.0.output.weight",
                "layers.1.moe.experts.w1", "layers.0.attention.wo.weight"]  # fmt: skip
    others = ["model.embed_tokens.weight", "tok_embeddings.weight", "wte.weight", "lm_head.weight",
              "output.weight", "layers.0.mlp.gate.weight", "moe.router.gate.weight"]  # fmt: skip
    model = torch.nn.Module()
    for name in (*matrices, *others):
        module = model
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                setattr(module, part, torch.nn.Module())
            module = getattr(module, part)
        setattr(module, leaf, torch.nn.Parameter(torch.ones(2, 2)))
    found = {n: g["algorithm"] for g in parameter_groups(model) for n in g["param_names"]}
    assert found == dict.fromkeys(matrices, "muon") | dict.fromkeys(others, "adamw")
