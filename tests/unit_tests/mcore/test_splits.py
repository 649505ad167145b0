# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Tags of parameters whose blocks are orthogonalized separately; test_muon.py has the bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.plan.layout import Splits, all_heads, halves


def _modules() -> Any:
    """Return a chunk with each layer that fuses matrices, as Megatron names and configures them."""

    def linear(num_rows: int, *names: str) -> torch.nn.Module:
        module = torch.nn.Module()
        for name in names or ("weight", "bias"):
            shape = (num_rows,) if name == "bias" else (num_rows, 6)
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        return module

    def holder(kind: str, config: dict[str, Any], **layers: torch.nn.Module) -> torch.nn.Module:
        module = type(kind, (torch.nn.Module,), {})()
        module.config = SimpleNamespace(**config)
        for name, layer in layers.items():
            module.add_module(name, layer)
        return module

    gated = {"gated_linear_unit": True}
    mla = {"qk_head_dim": 5, "qk_pos_emb_head_dim": 3, "v_head_dim": 4}
    chunk = torch.nn.Module()
    # Two query groups of two queries each, heads of four rows.
    chunk.config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=4)
    for name, module in {
        "attention": holder("SelfAttention", {}, linear_qkv=linear(32)),
        "latent": holder(
            "MLASelfAttention", mla, linear_q_proj=linear(32), linear_kv_up_proj=linear(36),
            linear_q_down_proj=linear(9),
        ),
        "mlp": holder("MLP", gated, linear_fc1=linear(40), linear_fc2=linear(6)),
        "plain": holder("MLP", {"gated_linear_unit": False}, linear_fc1=linear(40)),
        "experts": holder(
            "TEGroupedMLP", {**gated, "moe_mlp_glu_interleave_size": 4},
            linear_fc1=linear(40, "weight0", "weight1"),
        ),
        "shared": holder(
            "FusedSharedExpertMLP", {**gated, "moe_shared_expert_glu_interleave_size": None},
            linear_fc1=linear(20),
        ),
    }.items():  # fmt: skip
        chunk.add_module(name, module)
    return chunk


QKV = {"attention.linear_qkv.weight": (8, 4, 4)}
GLU = {
    "mlp.linear_fc1.weight": (20, 20),
    "experts.linear_fc1.weight0": (4, 4),
    "experts.linear_fc1.weight1": (4, 4),
    "shared.linear_fc1.weight": (10, 10),
}
MLA = {"latent.linear_q_proj.weight": (5, 3), "latent.linear_kv_up_proj.weight": (5, 4)}


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (Splits(), QKV),
        (Splits(qkv=False), {}),
        (Splits(glu=True), {**QKV, **GLU}),
        (Splits(qkv=False, glu=True), GLU),
        (Splits(mla=True), {**QKV, **MLA}),
        (Splits(per_head=True), {"attention.linear_qkv.weight": (4,) * 8}),
        (
            Splits(per_head=True, mla=True, glu=True),
            {
                "attention.linear_qkv.weight": (4,) * 8,
                "latent.linear_q_proj.weight": (5, 3) * 4,
                "latent.linear_kv_up_proj.weight": (5, 4) * 4,
                **GLU,
            },
        ),
    ],
    ids=str,
)
def test_parameters_are_tagged_by_the_module_that_holds_them(splits, expected):
    """Each flag tags the parameters of its modules, and heads of attention alone are marked."""
    from megatron_muon.mcore.splits import tag_blocks

    chunk = _modules()
    tag_blocks(chunk, splits, lambda param: param.shape[0])
    tagged, heads = {}, set()
    for name, param in chunk.named_parameters():
        assert getattr(param, "is_qkv", False) == hasattr(param, "qkv_split_shapes")
        if hasattr(param, "qkv_split_shapes"):
            tagged[name] = tuple(param.qkv_split_shapes)
        if getattr(param, "is_split_by_head", False):
            heads.add(name)
    assert tagged == expected
    assert heads == (expected.keys() - GLU.keys() if splits.per_head else set())


def test_parts_of_a_query_group_stay_whole_or_are_refused():
    """A part of a query group stays whole, or is refused per head."""
    from megatron_muon.mcore.splits import tag_blocks

    chunk = _modules()
    tag_blocks(chunk, Splits(), lambda param: 8)
    assert not hasattr(chunk.attention.linear_qkv.weight, "is_qkv")
    with pytest.raises(ValueError, match="linear_qkv: expected whole query groups of 16 rows"):
        tag_blocks(chunk, Splits(per_head=True), lambda param: 8)


def test_rows_of_heads_and_halves():
    """Rows of heads and halves equal a count by hand."""
    assert all_heads((8, 8, 4, 4), 48, 4) == (4, 4, 4, 4, 4, 4) * 2
    assert all_heads((5, 3), 24) == (5, 3, 5, 3, 5, 3)
    assert halves(14) == (7, 7)
    with pytest.raises(ValueError, match="--muon-split-qkv-per-head: expected query, key and"):
        Splits(qkv=False, per_head=True)
