# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of models of transformers, from their config.json."""

import json
import sys
from typing import Any

import pytest
from helpers.commands import run_command
from helpers.device import device, init_group, kind
from helpers.ranks import ROOT, run_ranks

from megatron_muon.tools.plan.command import main

pytest.importorskip("transformers", minversion="5")

_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {**_SMALL, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_MOE = {**_EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [0]}
_LATENT = {
    **_EXPERTS, "model_type": "deepseek_v2", "num_key_value_heads": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": None,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
# What is special of each; replicas on the right. Tables of architectures refused most of them.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "tied embeddings": ({**_SMALL, "model_type": "llama", "tie_word_embeddings": True}, 1),
    "replicas": ({**_SMALL, "model_type": "llama", "hidden_size": 40}, 2),
    "fused": ({**_SMALL, "model_type": "phi3"}, 1),
    "as many experts as shards": ({**_MOE, "num_experts": 4}, 1),
    "experts of replicas": ({**_MOE, "num_experts": 8}, 2),
    "experts that do not divide": ({**_MOE, "num_experts": 6}, 1),
    "fewer experts than ranks": ({**_MOE, "num_experts": 2}, 1),
    "experts by columns, interleaved": (
        {**_EXPERTS, "model_type": "gpt_oss", "num_local_experts": 4}, 1),
    "experts by columns": (
        {**_EXPERTS, "model_type": "llama4_text", "num_local_experts": 6,
         "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}, 1),
    "queries that are not compressed": (_LATENT, 1),
    "weights stored as (inputs, outputs)": (
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}, 1),
    "two stacks, a shared embedding": (
        {"model_type": "t5", "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4,
         "vocab_size": 96}, 1),
    "bidirectional": (
        {**_SMALL, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, 1),
}  # fmt: skip


def _write(folder: Any, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def _compare_with_run(path: str, hsdp: int) -> list[str]:
    """Return the lines of a run's plans that the preview has otherwise."""
    from pathlib import Path

    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from megatron_muon.fsdp2 import MuonAdamW
    from megatron_muon.fsdp2.groups import choose
    from megatron_muon.plan.settings import PlanSettings
    from megatron_muon.tools.plan.simulation import Parallelism
    from megatron_muon.tools.plan.transformers_model import plan_choices, read_model

    config = transformers.AutoConfig.from_pretrained(path)
    heads = {"t5": "Seq2SeqLM", "bert": "MaskedLM"}
    auto = getattr(transformers, f"AutoModelFor{heads.get(config.model_type, 'CausalLM')}")
    model = auto.from_config(config).float().to(device())
    world_size = dist.get_world_size()
    mesh = init_device_mesh(kind(), (hsdp, world_size // hsdp), mesh_dim_names=("r", "s"))
    mesh = mesh if hsdp > 1 else mesh["s"]
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = MuonAdamW.from_model(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    # It plans at its first step.
    optimizer.step()
    assert optimizer.muon is not None
    plans = optimizer.muon.engine.plans
    # The rates of CPU ranks, which differ from those of GPUs.
    settings = PlanSettings(cost=plans[0].cost)
    parallel = Parallelism(world_size, hsdp=hsdp)
    simulated = plan_choices(choose(read_model(Path(path))), parallel, settings)
    expected = [plan for plan in simulated if dist.get_rank() in plan.ranks]
    assert len(plans) == len(expected) > 0
    return [
        f"{config.model_type}: {own} / {other}"
        for plan, simulated_plan in zip(plans, expected, strict=True)
        for own, other in zip(plan.entries(), simulated_plan.entries(), strict=True)
        if own != other
    ]


def _compare_all(cases: list[tuple[str, int]]) -> list[str]:
    init_group()
    return [line for case in cases for line in _compare_with_run(*case)]


@pytest.mark.slow
@pytest.mark.ranks
def test_plan_is_that_of_a_run(tmp_path):
    """The preview of a config.json has the plan of a run, line by line."""
    cases = []
    for number, (config, hsdp) in enumerate(CASES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        cases.append((_write(folder, config), hsdp))
    assert run_ranks(4, _compare_all, cases).check().results == [[]] * 4


# Default configurations with few layers; the cases above have other models.
REFUSED_BY_TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3-Next": ({"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 16},
                   "model.layers.3.mlp.experts.gate_up_proj[15] rows 0 to 511"),
    "Qwen3-VL": ({"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
                  "text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 2}},
                 "model.visual.blocks.1.attn.qkv.weight rows 1152 to 2303"),
    "Llama 4": ({"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"],
                 "text_config": {"num_hidden_layers": 2},
                 "vision_config": {"num_hidden_layers": 1}},
                "language_model.model.layers.1.feed_forward.experts.gate_up_proj[15] columns 8192 "
                "to 16383"),
    "MiniMax-M2": ({"model_type": "minimax_m2", "num_hidden_layers": 2, "num_local_experts": 16},
                   "model.layers.1.mlp.experts.down_proj[15]"),
    "Nemotron-H": ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*",
                    "num_hidden_layers": 3}, "model.layers.0.mixer.in_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_BY_TABLES)
def test_any_model_is_planned(name, tmp_path, capsys):
    """Models that tables of architectures cannot describe are planned."""
    config, matrix = REFUSED_BY_TABLES[name]
    assert main(["--hf", _write(tmp_path, config), "--dp", "8", "--json"]) == 0
    assert matrix in {each["name"] for each in json.loads(capsys.readouterr().out)["matrices"]}


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ({"model_type": "unheard_of"}, "", "the meta device, got ValueError: The checkpoint you"),
        ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "modeling.Model"}}, "",
         "contains custom code which must be executed"),
        ({**LLAMA, "num_hidden_layers": "two"}, "", "Field 'num_hidden_layers' expected int"),
        # Of a text of several lines: the reason is in a later one.
        ({**LLAMA, "hidden_size": 4098}, "", "got StrictDataclassClassValidationError: Class "
         "validation error for validator 'validate_architecture': ValueError: The hidden size"),
        ({}, "", "Should have a `model_type` key in its config.json. Correct it, or pass"),
        ([], "", "Should have a `model_type` key in its config.json"),
        (LLAMA, "--tp 2 --num-layers 4 --muon-split-glu",
         "--hf: expected --dp and --hsdp alone, got --num-layers, --muon-split-glu, --tp."),
        (LLAMA, "--preset llama3-8b", "--hf: expected --dp and --hsdp alone, got --preset."),
        (LLAMA, "--dp 6 --hsdp 4", "hsdp: expected dp to be a multiple of 4 instances"),
        (LLAMA, "--model-tflops 0", "--model-tflops: expected a positive number"),
    ],
)  # fmt: skip
def test_config_that_cannot_be_planned_is_refused(config, flags, message, tmp_path, capsys):
    """A config.json that cannot be planned is refused in one line, by name."""
    with pytest.raises(SystemExit):
        main(["--hf", _write(tmp_path, config), *flags.split()])
    assert message in capsys.readouterr().err


def test_missing_file_and_missing_transformers_are_refused(tmp_path, monkeypatch, capsys):
    """A path that is not there is not looked up on the hub, and transformers is asked for."""
    for path, text in (
        ("none.json", "got FileNotFoundError"),
        (_write(tmp_path, LLAMA), "got Mod"),
    ):
        if text == "got Mod":
            monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(SystemExit):
            main(["--hf", str(tmp_path / path)])
        assert text in capsys.readouterr().err


def test_summary_answers_in_seven_lines(tmp_path, capsys):
    """The summary of a folder has seven lines."""
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    _write(folder, LLAMA)
    assert main(["--hf", str(folder), "--dp", "4", "--gpu-gb", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "Llama-3.1-8B: 1.5 B parameters, 0.4 B of them in matrices of Muon, on 4 GPUs"
    )
    # Two layers of 218 M elements, and embedding and head of 525 M: 4 x 2 bytes, and 4 or 8 more.
    assert "memory, GB a GPU: weights and gradients 3.0, states 2.5 (AdamW 3.0)" in lines[1]
    assert lines[2].startswith("fits: ") and "of 9 GB are left" in lines[2]
    assert len(lines) == 7 and lines[6].startswith("bound by Newton-Schulz, spread evenly")


# By hand: (parameters, of Muon, that multiply a token) and (Muon, AdamW) on the fullest rank.
_ATTENTION, _EXPERT = 4 * 32 * 32 - 2 * 16 * 32, 3 * 32 * 12
_HEAD, _VECTORS, _GATE = 96 * 32, 2 * 32 + 2 * 8, 6 * 32


@pytest.mark.parametrize(("is_tied", "num_embeddings"), [(True, 1), (False, 2)])
def test_parameters_are_counted(is_tied, num_embeddings, tmp_path):
    """Counts on the fullest rank include the experts that few ranks hold."""
    from megatron_muon.fsdp2.groups import choose
    from megatron_muon.tools.plan.transformers_model import count, read_model

    config = {**_MOE, "num_hidden_layers": 1, "mlp_only_layers": [], "num_experts": 6}
    _write(tmp_path, {**config, "tie_word_embeddings": is_tied})
    model = read_model(tmp_path)
    size, on_rank = count(model, choose(model), 64)
    muon = _ATTENTION + 6 * _EXPERT
    # The norm behind the layer is a vector too.
    others = _VECTORS + 32 + _GATE
    assert size[:3] == (
        muon + others + num_embeddings * _HEAD,
        muon,
        _ATTENTION + 2 * _EXPERT + others + _HEAD,
    )
    # A row of each matrix: of query and output 32, of key and value 32; embeddings have 96 rows.
    assert on_rank == (4 * 32 + _EXPERT, 2 + 2 + 1 + 32 + num_embeddings * 2 * 32)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4"},
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_example_of_the_documents(tmp_path, capsys):
    """The example in docs/performance.md is the output of its command."""
    path = tmp_path / "gpt-oss-120b.json"
    path.write_text(json.dumps(GPT_OSS))
    assert main(["--hf", str(path), "--dp", "64"]) == 0
    text = (ROOT / "docs" / "performance.md").read_text()
    assert f"```\n{capsys.readouterr().out}```" in text
    assert "--hf gpt-oss-120b.json --dp 64" in text


@pytest.mark.slow
def test_command_needs_no_network_and_no_kernels(tmp_path):
    """The command plans without network, kernels or code of the model's author."""
    config = {**LLAMA, "vocab_size": 96, "attn_implementation": "flash_attention_2"}
    # Code beside the weights is not run, and nobody is asked whether it may.
    config["auto_map"] = {"AutoConfig": "somebody/code--config.Config"}
    command = (sys.executable, "-m", "megatron_muon.plan", "--hf", _write(tmp_path, config))
    done = run_command(*command, env={"HTTPS_PROXY": "http://localhost:1"})
    assert done.returncode == 0, done.stderr
    assert "muon: linear: 14 parameters" in done.stderr and "Traceback" not in done.stderr
