# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model go to Muon, by module, names and shape."""

import copy
import logging
from typing import Any

import pytest
import torch
from helpers.fsdp2_models import mixed_model
from torch import nn

from megatron_muon.fsdp2 import MuonAdamW, parameter_groups


def algorithms(model: nn.Module, **options: Any) -> dict[str, str]:
    """Return the algorithm of each parameter, by every name that it has."""
    groups = parameter_groups(model, **options)
    found = {param: group["algorithm"] for group in groups for param in group["params"]}
    return {name: found[p] for name, p in model.named_parameters(remove_duplicate=False)}


def of_adamw(model: nn.Module) -> set[str]:
    return {name for name, algorithm in algorithms(model).items() if algorithm == "adamw"}


def layouts(model: nn.Module, **options: Any) -> dict[str, tuple[Any, bool]]:
    """Return ``split_sizes`` and ``transposed`` of each parameter of Muon."""
    return {
        name: (group.get("split_sizes"), group.get("transposed", False))
        for group in parameter_groups(model, **options)
        for name in group["param_names"]
        if group["algorithm"] == "muon"
    }


def modules(**members: Any) -> nn.Module:
    """Return a module with children, and with parameters of the shapes that are tuples."""
    module = nn.Module()
    for name, member in members.items():
        is_shape = isinstance(member, tuple)
        setattr(module, name, nn.Parameter(torch.rand(member)) if is_shape else member)
    return module


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def test_parameters_are_sorted_by_name_shape_and_module(caplog):
    """Matrices go to Muon, and a line of each kind says why."""
    with caplog.at_level(logging.WARNING, logger="megatron_muon"):
        groups = parameter_groups(mixed_model(), elementwise_options={"lr": 0.5})
    names = {group["algorithm"]: group["param_names"] for group in groups}
    # A gate without experts is half of a SwiGLU.
    assert names["muon"] == ["up.weight", "gate.weight", "down.weight"]
    rest = ["embed.weight", "conv.weight", "conv.bias", "up.bias"]
    assert names["adamw"] == [*rest, "norm.weight", "norm.bias", "head.weight"]
    assert all(group.get("lr") == {"adamw": 0.5}.get(group["algorithm"]) for group in groups)
    assert "muon: linear: 3 parameters" in caplog.text
    assert "adamw, lr 0.5: embedding: 1 parameters" in caplog.text
    assert "unclear" not in caplog.text


def test_convolutions_go_to_muon_where_that_is_asked_for():
    """flatten=True gives convolutions to Muon, in a group of their own."""
    groups = parameter_groups(mixed_model(), flatten=True, elementwise_names=[r"^up\."])
    of_muon = [group for group in groups if group["algorithm"] == "muon"]
    assert [(g["param_names"], g.get("flatten", False)) for g in of_muon] == [
        (["conv.weight"], True),
        (["gate.weight", "down.weight", "head.weight"], False),
    ]


def test_names_of_real_models_are_sorted_rightly():
    """Parameters named as in Hugging Face, torchtitan and GPT-2 are sorted by their role."""
    matrices = ["layers.0.mlp.gate_proj.weight", "attention.output.dense.weight", "h.0.c.weight",
                "layers.0.output.weight", "layers.2.mlp.gate.weight", "layers.2.mlp.up.weight",
                "embedder.layers.0.attention.q.weight",
                "layers.1.sa_heads.proj.weight", "layers.1.moe.experts.w1",
                "layers.0.attention.wo.weight"]  # fmt: skip
    others = ["model.embed_tokens.weight", "tok_embeddings.weight", "wte.weight", "lm_head.weight",
              "output.weight", "layers.1.moe.gate.weight", "moe.router.gate.weight",
              "pretrained.v_head.summary.weight", "value_head.weight", "qa_outputs.weight",
              "to_logits.weight", "score.weight", "classifier.out_proj.weight", "pos_embed",
              "layers.3.shared_head.head.weight"]  # fmt: skip
    model = nn.Module()
    for name in (*matrices, *others):
        module = model
        *path, leaf = name.split(".")
        for part in path:
            module = module._modules.setdefault(part, nn.Module())
        setattr(module, leaf, nn.Parameter(torch.ones(2, 2)))
    assert algorithms(model) == dict.fromkeys(matrices, "muon") | dict.fromkeys(others, "adamw")


@pytest.mark.parametrize("is_head_first", [False, True])
@pytest.mark.parametrize("names", [("shared", "out"), ("tok", "lm_head")])
def test_shared_embedding_is_stepped_by_adamw(names, is_head_first):
    """A head that shares the weight of an embedding goes to AdamW in any order."""
    embedding, head = nn.Embedding(24, 8), linear(8, 24)
    head.weight = embedding.weight
    children = list(zip(names, (embedding, head), strict=True))
    ordered = dict(reversed(children) if is_head_first else children)
    assert of_adamw(modules(**ordered, body=linear(8, 8))) == {f"{n}.weight" for n in names}


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "net.", "module._orig_mod."])
def test_output_layer_is_known_behind_a_prefix(prefix):
    """The output layer is known behind the prefixes of torch.compile and DDP."""
    block = modules(attention=modules(output=linear(8, 8)), output=linear(8, 8))
    model = modules(layers=nn.ModuleList([block]), output=linear(8, 24))
    for name in reversed(prefix.split(".")[:-1]):
        model = modules(**{name: model})
    assert of_adamw(model) == {f"{prefix}output.weight"}


def test_head_is_known_by_the_rows_of_an_embedding():
    """A last layer with as many rows as an embedding is a head, but not one in a block."""
    block = modules(up=linear(8, 24), down=linear(24, 8))
    model = modules(
        tok=nn.Embedding(24, 8),
        positions=nn.Embedding(16, 8),
        wide=linear(8, 16),
        narrow=linear(16, 8),
        square=linear(24, 24),
        layers=nn.ModuleList([block]),
        last=linear(8, 24),
    )
    assert of_adamw(model) == {"tok.weight", "positions.weight", "last.weight"}
    # Sequential numbers its layers, and a class of its own may look rows up.
    rows = type("Table", (nn.Embedding,), {})
    found = algorithms(nn.Sequential(rows(24, 8), linear(8, 24), linear(24, 8), linear(8, 24)))
    assert list(found.values()) == ["adamw", "muon", "muon", "adamw"]


def test_matrices_with_names_are_muons_with_a_warning(caplog):
    """Named matrices without algorithms go to Muon with a warning, not silently."""
    matrices = [torch.nn.Parameter(torch.ones(4, 3))]
    with caplog.at_level(logging.WARNING, logger="megatron_muon"):
        optimizer = MuonAdamW(iter([("up", matrices[0])]))
    assert "Muon steps all parameters" in caplog.text
    assert optimizer.algorithms == ("muon",)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megatron_muon"):
        optimizer = MuonAdamW([{"params": matrices}, {"params": [], "algorithm": "adamw"}])
    assert not caplog.text
    assert optimizer.algorithms == ("muon", "adamw")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (lambda model: model.parameters(), "parameter 0: expected matrices with names, or groups"),
        (lambda model: [model.up.weight], "got no name"),
        (lambda model: [{"params": model.parameters(), "weight_decay": 0.1}], "got no name"),
        (lambda model: model.named_parameters(), "embed.weight: expected matrices with names"),
        (lambda model: [("up", model.up.weight), ("b", model.up.bias)], "b: expected matrices"),
        (lambda model: [("conv", model.conv.weight)], "got shape (8, 3, 2, 2)"),
        (lambda model: [("lm_head.weight", model.up.weight)], "got head"),
    ],
)
def test_parameters_without_algorithm_are_refused_at_construction(params, said):
    """Parameters without names or algorithms are refused before the first step."""
    with pytest.raises(ValueError) as error:
        MuonAdamW(params(mixed_model()), lr=0.1, betas=(0.9, 0.95))
    for text in (said, "MuonAdamW.from_model(model, ...)", "megatron_muon.fsdp2.from_parameters"):
        assert text in str(error.value)


def test_tensors_that_are_no_matrices_are_stepped_by_adamw(caplog):
    """Decay rates, mixing factors, tokens, tables and depthwise filters go to AdamW."""
    model = modules(
        A_log=(64, 8),
        time_mix_key=(1, 1, 32),
        cls_token=(1, 1, 32),
        reg_token=(1, 4, 32),
        latents=(6, 32),
        pos_embed=(1, 9, 32),
        conv1d_weight=(64, 1, 4),
        bias_table=(9, 4),
        lora_A=(4, 1),
        one=linear(8, 1),
        depthwise=nn.Conv1d(8, 8, 3, groups=8, bias=False),
        factors=nn.utils.weight_norm(linear(8, 6)),
        parametrized=nn.utils.parametrizations.weight_norm(linear(8, 6)),
        matrices=modules(
            experts=modules(gate_up_proj=(4, 64, 32), w2=(4, 32, 32)),
            in_proj=linear(8, 6),
            attention=nn.MultiheadAttention(8, 2, bias=False),
            memory=nn.LSTM(8, 6, bias=False),
        ),
    )
    with caplog.at_level(logging.WARNING, logger="megatron_muon"):
        found = algorithms(model, flatten=True)
    names = {name for name in found if name.startswith("matrices.")}
    assert {name for name, algorithm in found.items() if algorithm == "muon"} == names
    unclear = [record.args[0] for record in caplog.records if "unclear" in record.message]
    assert any("A_log, reg_token, latents" in each for each in unclear)
    assert any(each == "matrices.experts.gate_up_proj" for each in unclear)


def test_use_muon_of_a_parameter_or_its_module_decides():
    """The attribute use_muon of a parameter or its module decides, as under Megatron."""
    model = modules(lm_head=linear(8, 24), body=linear(8, 8), other=linear(8, 8))
    model.lm_head.weight.use_muon = True
    model.body.weight.use_muon = False
    model.other.use_muon = False
    assert of_adamw(model) == {"body.weight", "other.weight"}


def test_adapters_are_stepped_by_adamw_unless_asked_for():
    """Matrices of LoRA, as peft and torchtune name them, go to AdamW unless asked for."""
    peft = modules(base_layer=linear(8, 6))
    peft.base_layer.requires_grad_(False)
    peft.lora_A = nn.ModuleDict({"default": linear(8, 2)})
    peft.lora_B = nn.ModuleDict({"default": linear(2, 6)})
    model = modules(q_proj=peft, v_proj=modules(lora_a=linear(8, 2)))
    groups = parameter_groups(model)
    assert [group["algorithm"] for group in groups] == ["adamw"]
    for name, module in model.named_modules():
        module.use_muon = "lora_" in name
    assert [group["algorithm"] for group in parameter_groups(model)] == ["muon"]


def test_gate_is_a_router_only_beside_experts():
    """The gate of a dense SwiGLU goes to Muon, and a router to AdamW."""
    swiglu = modules(gate=linear(8, 6), up=linear(8, 6), down=linear(6, 8))
    moe = modules(gate=linear(8, 4), experts=nn.ModuleList([swiglu]), shared_experts=swiglu)
    counted = modules(gate=modules(wg=linear(8, 4)))
    counted.num_experts = 4
    model = modules(dense=swiglu, moe=moe, counted=counted)
    assert of_adamw(model) == {"moe.gate.weight", "counted.gate.wg.weight"}


def test_experts_without_a_gate_are_stored_as_their_module_says():
    """Experts without a gate are transposed where their module says so."""
    experts = modules(up_proj=(4, 5, 6), down_proj=(4, 6, 5))
    experts.is_transposed = True
    assert layouts(modules(experts=experts)) == {
        "experts.up_proj": (None, True),
        "experts.down_proj": (None, True),
    }


def attention(key: str, outputs: int, inputs: int = 8, **attributes: Any) -> nn.Module:
    """Return an attention layer that says its numbers of heads."""
    module = modules(**{key: linear(inputs, outputs)})
    module.config = nn.Module()
    for name, value in attributes.items():
        setattr(module.config if name.startswith("num_key") else module, name, value)
    return module


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        # Grouped queries; vision towers, by the heads or the width; Hiera, which widens.
        (attention("qkv_proj", 16, num_heads=4, num_key_value_heads=2), (8, 4, 4)),
        (attention("qkv", 24), 3),
        (attention("qkv", 48, num_heads=4, head_dim=4), 3),
        # Groups of a name that is not known, and of litgpt.
        (attention("qkv", 48, num_heads=4), None),
        (attention("qkv", 32, n_head=4, n_query_groups=2, head_size=4), (16, 8, 8)),
        # The width of a head says that the numbers are not those of this layer.
        (attention("query_key_value", 24, num_heads=4, num_kv_heads=2, head_size=2), None),
        # Nothing says anything.
        (attention("qkv", 20), None),
        # Falcon, by group; GPT-BigCode, of as many groups as heads.
        (attention("query_key_value", 16, num_heads=4, num_kv_heads=2), (4, 2, 2)),
        (attention("c_attn", 24, num_heads=4, kv_heads=4, multi_query=False), (2, 2, 2)),
    ],
)
def test_attention_is_split_where_its_module_says_the_sizes(layer, sizes, caplog):
    """Fused attention is split by the sizes of its module, and otherwise named in a warning.

    test_architectures.py has Phi-3, CodeGen, GPT-NeoX, BLOOM, and one group for all heads.
    """
    with caplog.at_level(logging.WARNING, logger="megatron_muon"):
        ((found, is_transposed),) = layouts(layer).values()
    assert (found, is_transposed) == (sizes, False)
    assert ("fused, in one matrix" in caplog.text) == (sizes is None)


@pytest.mark.parametrize(
    ("key", "sizes"),
    [
        ("wqkv", (32, 16, 16)),
        ("w13", (32, 32)),
        ("w12", (32, 32)),
        ("w1_w3", (32, 32)),
        ("w31_proj", (32, 32)),
        ("to_kv", (32, 32)),
        ("gate_and_up", (32, 32)),
    ],
)
def test_warning_of_a_fused_name_has_the_form_of_splits(key, sizes, caplog):
    """The warning of a fused matrix shows the ``splits`` that would split it."""
    model = modules(mlp=modules(**{key: linear(8, 64)}), norm=modules(w2=linear(8, 8)))
    with caplog.at_level(logging.WARNING, logger="megatron_muon"):
        parameter_groups(model)
    form = f'splits={{r"\\b{key}\\b": (outputs, outputs)}}'
    assert "fused, in one matrix" in caplog.text and form in caplog.text
    found = layouts(model, splits={rf"\b{key}\b": sizes})
    assert found == {f"mlp.{key}.weight": (sizes, False), "norm.w2.weight": (None, False)}


def test_gate_and_up_beside_down_are_split():
    """The shape of the down projection tells that gate and up are stacked."""
    experts = modules(w13=(4, 12, 8), w2=(4, 8, 6))
    model = modules(experts=experts, mlp=modules(w13=linear(8, 12), w2=linear(6, 8)))
    assert {name: sizes for name, (sizes, _) in layouts(model).items()} == {
        "experts.w13": 2,
        "experts.w2": None,
        "mlp.w13.weight": 2,
        "mlp.w2.weight": None,
    }


def test_complex_matrices_are_stepped_by_adamw():
    """Complex matrices go to AdamW, since Newton-Schulz refuses them."""
    model = modules(up=nn.Linear(4, 6, bias=False, dtype=torch.complex64), down=linear(6, 4))
    assert of_adamw(model) == {"up.weight"}
    theirs = copy.deepcopy(model)
    optimizer = MuonAdamW.from_model(model, lr=0.1)
    reference = torch.optim.AdamW(theirs.up.parameters(), lr=0.1, weight_decay=0.01)
    for each, stepped in ((model, optimizer), (theirs, reference)):
        for param in each.parameters():
            param.grad = torch.ones_like(param)
        stepped.step()
    assert torch.equal(model.up.weight, theirs.up.weight)


def test_stacked_gates_and_experts_are_split_into_matrices():
    """Gates of LSTM and GRU, and stacked experts as in DBRX, are split."""
    experts = modules(w1=(4 * 6, 8), v1=(4 * 6, 8), w2=(4 * 6, 8))
    experts.moe_num_experts = 4
    model = modules(a=nn.LSTM(8, 6, bias=False), b=nn.GRUCell(8, 6, bias=False), c=nn.RNN(8, 6))
    model.ffn = modules(experts=modules(mlp=experts))
    # A layer beside experts that has their configuration; stored transposed and without a gate.
    model.d = modules(weight=(8, 6))
    model.d.config = nn.Module()
    model.d.config.num_experts = 4
    up, down, cross = modules(weight=(8, 12)), modules(weight=(12, 8)), modules(weight=(8, 16))
    (up.nx, up.nf), (down.nx, down.nf), (cross.nx, cross.nf) = (8, 12), (12, 8), (8, 16)
    model.e = modules(fc1=up, fc2=down, c_attn=cross)
    assert layouts(model.e) == {
        "fc1.weight": (None, True),
        "fc2.weight": (None, True),
        # GPT-2's cross-attention: key and value.
        "c_attn.weight": (2, True),
    }
    sizes = {"a.weight_ih_l0": 4, "a.weight_hh_l0": 4, "b.weight_ih": 3, "b.weight_hh": 3}
    sizes |= {f"ffn.experts.mlp.{name}": 4 for name in ("w1", "v1", "w2")}
    whole = ["c.weight_ih_l0", "c.weight_hh_l0", "d.weight", "e.fc1.weight", "e.fc2.weight"]
    assert {name: found for name, (found, _) in layouts(model).items()} == {
        **dict.fromkeys(whole),
        **sizes,
        "e.c_attn.weight": 2,
    }


def test_wrappers_of_one_layer_hide_nothing():
    """A compiled or checkpointed layer is chosen by the layers beside it."""
    moe = modules(experts=nn.ModuleList([linear(8, 8)]))
    moe.gate = modules(_orig_mod=linear(8, 4))
    mlp = modules(
        down_proj=linear(6, 8), gate_up_proj=modules(_checkpoint_wrapped_module=linear(8, 12))
    )
    model = modules(moe=moe, mlp=mlp)
    assert algorithms(model)["moe.gate._orig_mod.weight"] == "adamw"
    found = layouts(model)["mlp.gate_up_proj._checkpoint_wrapped_module.weight"]
    assert found == (2, False)


def test_splits_of_the_user_come_first():
    """Sizes by pattern come before rules, and None keeps a matrix whole."""
    model = modules(
        attention=nn.MultiheadAttention(8, 2, bias=False),
        first=attention("qkv_proj", 20),
        second=attention("qkv", 24),
    )
    found = layouts(model, splits={r"first\.qkv_proj": [8, 8, 4], r"second\.qkv": None})
    assert found == {
        "attention.in_proj_weight": (3, False),
        "attention.out_proj.weight": (None, False),
        "first.qkv_proj.weight": ((8, 8, 4), False),
        "second.qkv.weight": (None, False),
    }


def test_what_was_chosen_is_shown():
    """The summary has a line for each parameter, with the reason."""
    model = modules(embed=nn.Embedding(24, 8), attention=nn.MultiheadAttention(8, 2, bias=False))
    first, _, last = MuonAdamW.from_model(model, lr=0.1).summary().splitlines()
    assert first.split() == "attention.in_proj_weight (24, 8) muon split_sizes 3 linear".split()
    assert last.split() == "embed.weight (24, 8) adamw embedding".split()
