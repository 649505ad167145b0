# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What Muon gets of real architectures, from a record of their modules, names and shapes."""

import json

import architectures as script
import pytest
import torch
from torch import nn

from megatron_muon.fsdp2.groups import choose

RECORDS = json.loads(script.RECORD.read_text())


@pytest.mark.parametrize("model_type", RECORDS)
def test_matrices_of_real_architectures_go_to_muon(model_type):
    """The choices for each recorded architecture are the recorded ones."""
    recorded = RECORDS[model_type]
    assert script.choices(recorded) == {name: kind for kind, _, name, *_ in recorded["params"]}


def test_matrices_of_torch_go_to_muon():
    """Matrices of nn.Transformer go to Muon, with fused attention in three."""
    model = nn.Module()
    with torch.device("meta"):
        model.tokens = nn.Embedding(64, 16)
        model.transformer = nn.Transformer(16, 2, 1, 1, 32, bias=False)
        model.generator = nn.Linear(16, 64, bias=False)
    found = {each.name: (each.algorithm, each.options.get("split_sizes")) for each in choose(model)}
    matrices = {name: kind for name, kind in found.items() if kind[0] == "muon"}
    block = ("linear1.weight", None), ("linear2.weight", None)
    encoder = [*block, ("self_attn.in_proj_weight", 3), ("self_attn.out_proj.weight", None)]
    decoder = [*encoder, *((f"multihead_attn.{n}", k) for n, k in
                           (("in_proj_weight", 3), ("out_proj.weight", None)))]  # fmt: skip
    assert matrices == {
        f"transformer.{half}.layers.0.{name}": ("muon", sizes)
        for half, layer in (("encoder", encoder), ("decoder", decoder))
        for name, sizes in layer
    }
