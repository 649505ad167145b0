# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""QK-clip on row shards, against upstream's clip of whole weights.

With query groups and tensor parallelism upstream's clip fails: the reference is its rule, written
out. test_parity.py has the runs with a clip.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import cached_cases
from helpers.toy_fsdp import build_gpt, start_process_groups, wrap_gpt

pytestmark = pytest.mark.ranks


MULTI_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}


def _build_gpt(num_groups: int | None, num_tensor_ranks: int, *, is_bf16: bool) -> Any:
    """Build a two-layer GPT that clips at 0.5, the same in every call.

    Without a number of query groups attention is multi-latent.
    """
    from megatron.core.transformer.module import Float16Module

    gpt = build_gpt(
        num_attention_heads=4,
        tensor_model_parallel_size=num_tensor_ranks,
        bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        qk_clip=True,
        qk_clip_threshold=0.5,
        qk_clip_alpha=0.3,
        **(MULTI_LATENT if num_groups is None else {"num_query_groups": num_groups}),
    )
    return Float16Module(gpt.config, gpt) if is_bf16 else gpt


def _attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "clip_qk")]


@torch.no_grad()
def _clip_by_rule(attention: Any) -> None:
    """Clip the rows of a tensor-parallel rank: queries, keys and values of each group in turn."""
    num_groups = attention.num_query_groups_per_partition
    width = attention.hidden_size_per_attention_head
    largest = attention.core_attention.current_max_attn_logits.view(num_groups, -1).amax(1)
    factors = (0.5 / largest).clamp(max=1.0)
    groups = attention.linear_qkv.weight.chunk(num_groups)
    for rows, factor in zip(groups, factors, strict=True):
        num_queries = len(rows) - 2 * width
        rows[:num_queries] *= factor**0.3
        rows[num_queries : num_queries + width] *= factor**0.7


def _clip_both(
    num_groups: int | None, num_tensor_ranks: int, sharding: str, is_bf16: bool
) -> list[str]:
    """Clip row shards here, and whole weights by upstream's own method; compare the bits."""
    from megatron.core import parallel_state

    import megatron_muon
    from megatron_muon.mcore.fsdp_model import named_optimizer_parameters
    from megatron_muon.mcore.qk_clip import clip_row_shards
    from megatron_muon.rows.megatron_fsdp import own_rows

    megatron_muon.enable()
    from megatron.core.optimizer.qk_clip import clip_qk

    start_process_groups(tensor_model_parallel_size=num_tensor_ranks)
    gpt = _build_gpt(num_groups, num_tensor_ranks, is_bf16=is_bf16)
    # Main weights are fp32 copies of what bf16 rounded.
    reference = _build_gpt(num_groups, num_tensor_ranks, is_bf16=is_bf16).float()
    model = wrap_gpt(gpt, sharding, grad_reduce_in_fp32=True)
    data_rank = parallel_state.get_data_parallel_rank()
    num_data_ranks = parallel_state.get_data_parallel_world_size()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    largest = 0.0
    for index, (ours, theirs) in enumerate(
        zip(_attentions(model), _attentions(reference), strict=True)
    ):
        drawn = torch.Generator().manual_seed(10 * index + tensor_rank)
        # Up to 1: heads on both sides of the threshold.
        by_rank = torch.rand(num_data_ranks, 4 // num_tensor_ranks, generator=drawn)
        # A layer whose logits are all small keeps its weights.
        by_rank *= 1.0 if index == 0 else 0.4
        largest = max(largest, by_rank.max().item())
        ours.core_attention.current_max_attn_logits = by_rank[data_rank]
        theirs.core_attention.current_max_attn_logits = by_rank.amax(dim=0)
        if num_groups and num_tensor_ranks > 1:
            _clip_by_rule(theirs)
        else:
            theirs.clip_qk()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        clip_row_shards(model.module)
    assert all_reduce.call_count == 1
    prefix = "module." if is_bf16 else ""
    expected = dict(reference.named_parameters())
    different = [
        name
        for name, param in named_optimizer_parameters([model])
        if param.dim() == 2
        and not torch.equal(
            param._local_tensor, expected[prefix + name].detach()[slice(*own_rows(param))]
        )
    ]
    assert largest > 0.5
    # In fp32, and once: the next call has no new logits.
    assert [clip_qk([model]), clip_qk([model])] == [pytest.approx(largest, rel=1e-6), 0.0]
    # As --log-max-attention-logit does without a clip.
    for attention in _attentions(model):
        attention.core_attention.current_max_attn_logits = torch.full((1,), 0.25 * (data_rank + 1))
    assert clip_qk([model], log_max_only=True) == 0.25 * num_data_ranks
    for attention in _attentions(model):
        assert attention.core_attention.current_max_attn_logits is None
    return different


def _step_adam_over_any_module() -> list[str]:
    """Step Adam over a module without a configuration, which a script may wrap."""
    from megatron.core.transformer import TransformerConfig

    import megatron_muon
    from megatron_muon.mcore.qk_clip import clip_row_shards

    megatron_muon.enable()
    start_process_groups()
    clip_row_shards(type("MegatronFSDP", (), {"module": torch.nn.Linear(8, 8)})())
    found = []
    for settings in ({}, {"qk_clip": True, "attention_output_gate": True}):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)
        members = {"module": torch.nn.Linear(8, 8), "config": config}
        try:
            clip_row_shards(type("MegatronFSDP", (), members)())
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    return found


# By number of ranks: query groups or multi-latent attention, tensor-parallel ranks, sharding, bf16.
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "grouped_bf16": functools.partial(_clip_both, 2, 1, "optim", True),
        "latent_bf16": functools.partial(_clip_both, None, 1, "optim_grads_params", True),
        "one_group_per_rank": functools.partial(_clip_both, 2, 2, "optim_grads_params", False),
        "latent_zero0": functools.partial(_clip_both, None, 1, "no_shard", False),
        "any module": _step_adam_over_any_module,
    },
    3: {"grouped_fp32": functools.partial(_clip_both, 2, 1, "optim_grads_params", False)},
    4: {
        "latent_tp2": functools.partial(_clip_both, None, 2, "optim_grads", False),
        "two_groups_per_rank": functools.partial(_clip_both, 4, 2, "optim", True),
    },
}
results = cached_cases(CASES)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (3, "grouped_fp32"),
        (2, "grouped_bf16"),
        (2, "latent_bf16"),
        (2, "latent_zero0"),
        (2, "one_group_per_rank"),
        pytest.param(4, "latent_tp2", marks=pytest.mark.slow),
        pytest.param(4, "two_groups_per_rank", marks=pytest.mark.slow),
    ],
)
def test_rows_have_the_bits_of_upstreams_clip(world_size, name):
    """Row shards are clipped to upstream's bits by the largest logits of all ranks."""
    assert results(world_size)[name] == [[]] * world_size


def test_models_of_scripts_are_ignored_or_refused():
    """Models without a configuration are ignored, and layers that upstream cannot clip refused."""
    for nothing, refusal in results(2)["any module"]:
        assert nothing == "nothing"
        assert "--qk-clip --attention-output-gate" in refusal
