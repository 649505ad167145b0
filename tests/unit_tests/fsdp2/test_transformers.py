# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers, sharded over two ranks, against whole matrices."""

import copy
import re
from typing import Any

import pytest
import torch
from helpers.device import kind
from helpers.fsdp2_models import Sharded
from helpers.ranks import on_ranks
from helpers.whole_matrices import WholeMuon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_muon.fsdp2 import ExchangeSettings, MuonAdamW

pytest.importorskip("transformers")

_DENSE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_DENSE, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_FULL = {"layer_types": ["full_attention"] * 2}


# By model type: its head, its configuration, and what Muon gets: patterns of names, with the blocks
# that Newton-Schulz is to see. A T says that matrices are stored as (inputs, outputs).
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int | tuple[int, ...] | None]]] = {
    "llama": ("CausalLM", _GROUPED, {r"layers.*_proj\.": None}),
    "phi3": ("CausalLM", _GROUPED, {r"(o|down)_proj": None, "qkv_proj": (32, 16, 16),
                                    "gate_up": (48, 48)}),
    "gpt2": ("CausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96,
                          "n_positions": 64, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
             {r"c_attn\.weight T": 3, r"(c_proj|c_fc)\.weight T": None}),
    "gpt_neox": ("CausalLM", {**_DENSE, "hidden_dropout": 0, "attention_dropout": 0},
                 {r"query_key_value\.weight": (8, 8, 8), r"dense.*weight": None}),
    "mixtral": ("CausalLM", _EXPERTS, {r"self_attn.*_proj\.": None, r"experts\.down": None,
                                       r"experts\.gate_up": (48, 48)}),
    "gpt_oss": ("CausalLM", {**_EXPERTS, **_FULL},
                {r"self_attn.*_proj\.weight": None, r"experts\.down_proj$ T": None,
                 r"experts\.gate_up_proj$ T": (1, 1)}),
    "llama4_text": ("CausalLM", {**_EXPERTS, **_FULL, "num_experts_per_tok": 1,
                                 "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
                    {r"self_attn.*_proj\.|shared_expert": None,
                     r"experts\.gate_up_proj T": 2, r"experts\.down_proj T": None}),
    "t5": ("Seq2SeqLM", {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4,
                         "vocab_size": 96, "dropout_rate": 0, "decoder_start_token_id": 0},
           {r"(Attention\.[qkvo]|DenseReluDense\.w[io])\.weight": None}),
    "mamba": ("CausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96,
                           "state_size": 4, "intermediate_size": 64, "time_step_rank": 4},
              {r"(in|x|dt|out)_proj\.weight": None}),
    "bert": ("MaskedLM", {**_DENSE, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
             {r"(query|key|value|dense)\.weight": None}),
    "jetmoe": ("CausalLM", {**_EXPERTS, "kv_channels": 8},
               {r"mlp\.input_linear": (48, 48),
                r"output_linear|experts\.input_linear|kv_proj": None}),
}  # fmt: skip
MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True}


def _matrices(
    model: nn.Module, blocks: dict[str, int | tuple[int, ...] | None]
) -> dict[str, Sharded]:
    found = {}
    for name, param in model.named_parameters():
        pattern = next((key for key in blocks if re.search(key.removesuffix(" T"), name)), None)
        if pattern is not None:
            keys = {"split_sizes": blocks[pattern], "transposed": pattern.endswith(" T")}
            found[name] = Sharded(param, param.detach().clone(), keys)
    return found


def _model(model_type: str) -> nn.Module:
    import transformers

    head, options, _ = CASES[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    for param in model.parameters():
        # Some classes leave memory as it is.
        if param.ndim > 2:
            nn.init.normal_(param, std=0.02)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CASES)
@on_ranks(2)
def test_model_of_transformers_trains_as_whole_matrices_do(model_type):
    """Models of transformers train as emerging-optimizers and AdamW train whole ones."""
    model = _model(model_type)
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh(kind(), (2,)))
    # Of one owner and in fp32: bits are those of whole matrices.
    exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
    optimizer = MuonAdamW.from_model(model, fp32_matmul_prec="high", exchange=exchange, **MUON)
    matrices = _matrices(whole, CASES[model_type][2])
    reference = WholeMuon([*matrices.values()], scale_mode="spectral", extra_scale_factor=0.2,
                          fp32_matmul_prec="high", **MUON)  # fmt: skip
    rest = [param for name, param in whole.named_parameters() if name not in matrices]
    adamw = torch.optim.AdamW(rest, lr=MUON["lr"], weight_decay=MUON["weight_decay"])
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        tokens = torch.randint(3, 96, (2, 16), generator=generator)
        for each in (model, whole):
            each(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        adamw.step()
        reference.step([each.param.grad for each in matrices.values()])
        for each, (value, _) in zip(matrices.values(), reference.wholes(), strict=True):
            each.param.data.copy_(value)
        optimizer.zero_grad()
        whole.zero_grad()
    groups = zip(optimizer.algorithms, optimizer.param_groups, strict=True)
    names = {n for algorithm, g in groups if algorithm == "muon" for n in g["param_names"]}
    assert names == set(matrices) and len(names) >= 8
    # T5 alone has other bits: FSDP adds up the gradients of its shared embedding in another order.
    # Two steps of lr 0.02 then differ by a unit in the last place of a gradient.
    atol = 1e-6 if model_type == "t5" else 0.0
    for ours, param in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), param, rtol=0.0, atol=atol)  # type: ignore[attr-defined]
