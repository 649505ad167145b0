# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Shapes, plans and memory of transformers models, from their config.json."""

import dataclasses
import json
from typing import Any

import pytest
from helpers.device import device, init_group, kind
from helpers.ranks import ROOT, run_ranks

from megatron_muon.plan.__main__ import main
from megatron_muon.plan.layout import Splits
from megatron_muon.report.hf_config import read_config
from megatron_muon.report.model_shape import PRESETS, ModelShape
from megatron_muon.report.rank_report import build_report
from megatron_muon.report.simulation import Parallelism, simulate_fsdp2
from megatron_muon.report.summary import (
    count_elements,
    count_layers,
    memory_under_fsdp2,
    memory_under_megatron_fsdp,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
# Its vision model is not planned; the text model's vocabulary is a default of the class.
GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
# Parameters, billions, of AutoModelForCausalLM of transformers 5.24 with these configurations.
CONFIGS = {
    "llama3-8b": (LLAMA, 8.030),
    "qwen3-30b-a3b": (QWEN, 30.532),
    "deepseek-v3": (DEEPSEEK, 671.026),
    "gpt-oss-120b": (GPT_OSS, 116.829),
    "gemma3-27b": (GEMMA, 27.009),
}


def _write(folder: Any, config: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_have_the_parameters_of_the_model(name, tmp_path):
    """Those of three presets too, which are written by hand; biases of gpt-oss are left out."""
    config, billions = CONFIGS[name]
    model = read_config(_write(tmp_path, config))
    layers = count_layers(model, Parallelism(1))
    total = sum(map(sum, layers)) + model.embedding_elements
    assert total / 1e9 == pytest.approx(billions, rel=5e-4)
    assert PRESETS.get(name, model) == model


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "expected a model_type of gemma, "),
        ({**LLAMA, "num_hidden_layers": "32"}, "a whole number as num_hidden_layers, got none"),
        ({**QWEN, "mlp_only_layers": [1]}, "got mlp_only_layers or a decoder_sparse_step"),
        ({**DEEPSEEK, "q_lora_rank": None}, "a whole number as q_lora_rank, got none"),
        ([], "expected an object, got list"),
        ({**LLAMA, "text_config": None, "hidden_size": 0}, "hidden_size: expected a positive num"),
    ],
)
def test_config_that_cannot_be_planned_is_refused(config, message, tmp_path, capsys):
    """By name, and no default takes the place of a missing key."""
    with pytest.raises(SystemExit):
        main(["--hf", str(_write(tmp_path, config))])
    assert message in capsys.readouterr().err


def test_summary_answers_in_six_lines(tmp_path, capsys):
    """Flags replace keys of the file, as they replace fields of a preset."""
    path = str(_write(tmp_path, LLAMA))
    assert main(["--hf", path, "--num-layers", "2", "--dp", "4", "--fsdp2", "--gpu-gb", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "config: 1.5 B parameters, 0.4 B of them in matrices of Muon, on 4 GPUs"
    # Two layers of 218 M elements, and embedding and head of 525 M: 4 x 2 bytes, and 4 or 8 more.
    assert "memory, GB a GPU: weights and gradients 3.0, states 2.5 (AdamW 3.0)" in lines[1]
    assert lines[2].startswith("fits: ") and "of 9 GB are left" in lines[2]
    assert len(lines) == 6 and lines[5].startswith("bound by Newton-Schulz, spread evenly")


def test_flags_that_change_nothing_under_fsdp2_are_refused(tmp_path, capsys):
    """They would have changed the memory alone, or nothing; phi3 has no such matrices there."""
    fused = _write(tmp_path, {**LLAMA, "model_type": "phi3"})
    for flags, message in (
        ("--preset llama3-8b --fsdp2 --hfsdp --muon-split-glu", "got --hfsdp, --muon-split-glu."),
        (f"--hf {fused} --fsdp2", "got phi3, which fuses them"),
        ("--preset llama3-8b --model-tflops 0", "--model-tflops: expected a positive number"),
    ):
        with pytest.raises(SystemExit):
            main(flags.split())
        assert message in capsys.readouterr().err


def test_default_of_a_class_ties_the_output_layer(tmp_path):
    """SmolLM3's file does not say it."""
    config = {key: value for key, value in LLAMA.items() if not key.startswith("tie")}
    is_untied = [
        read_config(_write(tmp_path, {**config, "model_type": kind})).embedding_elements
        for kind in ("llama", "smollm3")
    ]
    assert is_untied == [2 * 128256 * 4096, 128256 * 4096]


def test_example_of_the_documents(tmp_path, capsys):
    """What docs/performance.md shows is what its command prints."""
    _write(tmp_path, GPT_OSS).rename(tmp_path / "gpt-oss-120b.json")
    flags = f"--hf {tmp_path}/gpt-oss-120b.json --dp 512 --ep 8"
    assert main(flags.split()) == 0
    text = (ROOT / "docs" / "performance.md").read_text()
    assert f"```\n{capsys.readouterr().out}```" in text
    assert "--hf gpt-oss-120b.json --dp 512 --ep 8" in text


@pytest.mark.parametrize("has_fp32", [True, False])
def test_memory_follows_the_sharding_strategy(has_fp32):
    """Of a model on two ranks, by hand: bytes of weights and gradients, states, and a step."""
    model = ModelShape(1, 8, 16, 2, 2, vocab_size=10)
    (muon, adamw), _ = count_layers(model, Parallelism(1))
    adamw += model.embedding_elements
    total, states, of_gradient = muon + adamw, 4 * muon + 8 * adamw, 4 if has_fp32 else 2
    expected = {
        "no_shard": ((2 + of_gradient + 4) * total, 1),
        "optim": ((2 + of_gradient + 2) * total, 2),
        "optim_grads": ((2 + of_gradient // 2 + 2) * total, 2),
        "optim_grads_params": ((1 + of_gradient // 2 + 2) * total, 2),
    }
    nothing = build_report(range(2), [])
    for sharding, (in_model, shards) in expected.items():
        memory = memory_under_megatron_fsdp(
            model, Parallelism(2, sharding=sharding), nothing, has_fp32_gradients=has_fp32
        )
        copies = 0 if has_fp32 else 4 * total // shards
        assert memory == (in_model, states // shards, 8 * total // shards, copies, copies)


def test_whole_experts_are_not_cut_under_fsdp2():
    """Of eight experts 64 ranks hold one or none: memory was an eighth of the fullest rank's."""
    model = ModelShape(1, 64, 128, 2, 2, num_experts=8, moe_ffn_hidden_size=128)
    memory = memory_under_fsdp2(model, 64, build_report(range(64), []))
    attention, expert, others = 4 * 64, 3 * 128 * 64, 8 // 8 * 64 + 2
    assert memory.model == 8 * (attention + expert + others)
    assert memory.muon == 4 * (attention + expert) + 8 * others
    assert memory.step == 4 * (attention + expert)


def _compare_plans(model: ModelShape, hsdp: int) -> list[str]:
    """Shard the matrices of a model by fully_shard, and return what Muon plans otherwise."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from megatron_muon.fsdp2 import Muon

    world_size = dist.get_world_size()
    mesh = init_device_mesh(kind(), (hsdp, world_size // hsdp), mesh_dim_names=("r", "s"))
    mesh = mesh if hsdp > 1 else mesh["s"]
    groups = []
    for layer in range(model.num_layers):
        for each in model.parameters_in_transformers(layer):
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(torch.zeros(each.shape, device=device()))
            fully_shard(module, mesh=mesh)
            named = [(f"layers.{layer}.{each.name}", module.weight)]
            # As from_model splits gate and up.
            groups.append({"params": named, **({"split_sizes": 2} if each.is_gated else {})})
    plans = Muon(groups).engine.plans
    simulated = simulate_fsdp2(model, Parallelism(world_size, hsdp=hsdp))
    expected = [plan for plan in simulated if dist.get_rank() in plan.ranks]
    assert len(plans) == len(expected)
    return [
        f"{own} / {other}"
        for plan, simulated_plan in zip(plans, expected, strict=True)
        for own, other in zip(plan.entries(), simulated_plan.entries(), strict=True)
        if own != other
    ]


SMALL = ModelShape(2, 16, 24, 4, 2, num_experts=8, moe_ffn_hidden_size=12, num_dense_layers=1)
LATENT = ModelShape(
    1, 16, 24, 4, 4, num_experts=6, moe_ffn_hidden_size=12, moe_shared_expert_intermediate_size=12,
    q_lora_rank=8, kv_lora_rank=6, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=4,
)  # fmt: skip


def _compare_all() -> list[str]:
    init_group()
    cases = [(SMALL, 1), (SMALL, 2), (LATENT, 1)]
    cases += [(dataclasses.replace(SMALL, num_experts=number), 1) for number in (6, 2)]
    return [text for case in cases for text in _compare_plans(*case)]


@pytest.mark.ranks
def test_plan_of_fsdp2_is_that_of_a_run():
    """Even and uneven rows, whole experts and ones that do not divide, replicas."""
    assert run_ranks(4, _compare_all).check().results == [[]] * 4


def test_fsdp2_has_the_matrices_of_megatron():
    """Unfused: the same elements but for routers, which are AdamW's."""
    for model in PRESETS.values():
        for layer in (0, model.num_layers - 1):
            fused = [
                *model.dense_parameters(layer, Splits()),
                *model.expert_parameters(layer, model.num_experts, Splits()),
            ]
            expected = count_elements(fused, is_fsdp2=True).muon
            found = model.parameters_in_transformers(layer)
            assert count_elements(found).muon == expected
