# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory and parameters of a job of Megatron-LM."""

import pytest

from megatron_muon.tools.plan.model_shape import PRESETS, ModelShape
from megatron_muon.tools.plan.rank_report import build_report
from megatron_muon.tools.plan.simulation import Parallelism
from megatron_muon.tools.plan.summary import (
    count_layers,
    memory_under_megatron_fsdp,
    size_of_shape,
)

# Parameters, billions, of AutoModelForCausalLM of transformers 5.24.
BILLIONS = {"llama3-8b": 8.030, "qwen3-30b-a3b": 30.532, "deepseek-v3": 671.026}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_presets_have_the_parameters_of_the_model(name, billions):
    """Presets have as many parameters as the models of transformers."""
    assert size_of_shape(PRESETS[name]).total / 1e9 == pytest.approx(billions, rel=5e-4)


@pytest.mark.parametrize("has_fp32", [True, False])
def test_memory_follows_the_sharding_strategy(has_fp32):
    """Bytes of weights, gradients, states and a step are those counted by hand."""
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
