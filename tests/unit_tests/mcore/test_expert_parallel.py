# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Under expert parallelism experts have an optimizer of their own, and share a schedule."""

from typing import Any

import pytest
from helpers.device import init_group
from helpers.ranks import run_ranks
from helpers.toy_fsdp import build_gpt, build_optimizer, run_backward, wrap_gpt

pytestmark = pytest.mark.ranks


def _step_with_experts() -> dict[str, Any]:
    from megatron.core import parallel_state

    import megatron_muon
    from megatron_muon.runtime.tensors import local_tensor

    megatron_muon.enable()
    init_group()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    gpt = build_gpt(
        num_moe_experts=4,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="alltoall",
        moe_ffn_hidden_size=16,
        moe_router_load_balancing_type="none",
    )
    model = wrap_gpt(gpt, "optim_grads_params")
    # Without decay, which would move weights that get no update.
    optimizer = build_optimizer(model, weight_decay=0.0)
    muons = optimizer.muon_step.optimizers
    params = [param for muon in muons for param in muon.params]
    before = [local_tensor(param).clone() for param in params]
    optimizer.zero_grad()
    run_backward(model)
    model.finish_grad_sync()
    optimizer.step()
    moved = [
        bool((local_tensor(param) != old).any())
        for param, old in zip(params, before, strict=True)
        if old.numel()
    ]
    errors = []
    for muon in muons:
        with pytest.raises(RuntimeError) as raised:
            muon.step()
        errors.append(str(raised.value))
    compute = optimizer.muon_step.compute
    return {
        "optimizers": len(muons),
        "plans": [len(plan.matrices) for plan in compute.plans],
        "ranks": [len(plan.ranks) for plan in compute.plans],
        "has_moved": all(moved) and bool(moved),
        "errors": errors,
    }


def test_experts_and_dense_matrices_share_one_engine():
    """Two optimizers, as Megatron has them, and one schedule; neither is stepped alone."""
    for found in run_ranks(4, _step_with_experts).check().results:
        assert found["optimizers"] == 2
        # Two experts on each expert-parallel rank, of two matrices in each of two layers; query,
        # key and value, projection and router in each layer, and the table of positions.
        assert found["plans"] == [8, 7] and found["ranks"] == [2, 4]
        assert found["has_moved"]
        assert all("expected a step of FSDPMuonChainedOptimizer" in e for e in found["errors"])
