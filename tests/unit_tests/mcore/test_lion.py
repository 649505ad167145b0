# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Lion beside Muon, on the shards of a real Megatron-FSDP model."""

from typing import Any
from unittest import mock

import pytest
from helpers.device import device
from helpers.ranks import run_ranks
from helpers.sharded_muon import with_local
from helpers.toy_fsdp import build_model, build_optimizer

pytestmark = pytest.mark.ranks


def _step_shards_and_whole(sharding: str) -> dict[str, Any]:
    """Step Lion's shards here and whole parameters with upstream's Lion; compare the bits."""
    import torch
    from emerging_optimizers.scalar_optimizers import Lion
    from torch.distributed.tensor import DTensor

    from megatron_muon.mcore.fsdp_model import named_optimizer_parameters
    from megatron_muon.step.lion import FSDPLion

    model = build_model(sharding)
    chain = build_optimizer(model, muon_scalar_optimizer="lion")
    (inner,) = (
        child.optimizer
        for child in chain.chained_optimizers
        if isinstance(child.optimizer, FSDPLion)
    )
    names = {param: name for name, param in named_optimizer_parameters([model])}
    params = [param for group in inner.param_groups for param in group["params"]]
    wholes = {
        param: torch.nn.Parameter(model.whole_weights[names[param]].clone()) for param in params
    }
    ranges = {param: _local_range(param, sharding) for param in params}
    upstream = Lion(
        [
            {**group, "params": [wholes[param] for param in group["params"]]}
            for group in inner.param_groups
        ]
    )

    seen: set[str] = set()
    states = {param: inner.state[param]["exp_avg"] for param in params}
    num_empty = num_updates = 0
    for step in range(3):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + index)
            whole = wholes[param]
            whole.grad = torch.randn(whole.shape, generator=generator).to(device())
            rows = whole.grad[ranges[param]]
            num_empty += rows.numel() == 0
            # What Megatron-FSDP leaves of an empty shard.
            param.grad = with_local(param, rows.clone()) if rows.numel() else None
        with mock.patch("torch._foreach_lerp", wraps=torch._foreach_lerp) as lerp:
            inner.step()
        for (averages, grads, _), _ in lerp.call_args_list:
            seen |= {type(tensor).__name__ for tensor in (*averages, *grads)}
            num_updates += len(averages)
        upstream.step()
    different = [
        names[param]
        for param in params
        if not torch.equal(param._local_tensor, wholes[param].detach()[ranges[param]])
        or not torch.equal(
            inner.state[param]["exp_avg"]._local_tensor,
            upstream.state[wholes[param]]["exp_avg"][ranges[param]],
        )
    ]
    kept = all(
        inner.state[param]["exp_avg"] is state and isinstance(state, DTensor)
        for param, state in states.items()
    )
    return {
        "different": different,
        "seen": sorted(seen),
        "num_updates": num_updates,
        "num_params": len(params),
        "num_empty": num_empty,
        "kept": kept,
    }


def _local_range(param: Any, sharding: str) -> slice:
    """Return which rows of a parameter, matrix or vector, this rank holds; called on all ranks."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    if sharding == "no_shard":
        return slice(None)
    uneven_dtensor.update_uneven_dtensor_chunk_metadata(param)
    chunks = param._local_tensor.__create_chunk_list__()
    if param._local_tensor.numel() == 0:
        return slice(0, 0)
    return slice(chunks[0].offsets[0], chunks[0].offsets[0] + chunks[0].sizes[0])


@pytest.mark.parametrize(("world_size", "sharding"), [(3, "optim_grads_params"), (2, "no_shard")])
def test_update_on_local_tensors_equals_upstreams_lion(world_size, sharding):
    """Its update is compiled, which on GPUs would trace DTensors of uneven placements.

    State stays the DTensors that checkpoints hold; empty shards are skipped.
    """
    run = run_ranks(world_size, _step_shards_and_whole, sharding, timeout_s=60.0).check()
    for found in run.results:
        assert found["different"] == []
        assert found["seen"] == ["Tensor"]
        assert found["kept"]
        assert found["num_updates"] == 3 * found["num_params"] - found["num_empty"]
    assert (sum(found["num_empty"] for found in run.results) > 0) == (sharding != "no_shard")
