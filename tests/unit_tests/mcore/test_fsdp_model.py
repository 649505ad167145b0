# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Row sharding of a real Megatron-FSDP model, and Muon's step on its shards."""

import functools
from typing import Any

import pytest
from helpers.device import device
from helpers.ranks import run_ranks
from helpers.toy_fsdp import build_model, build_optimizer

pytestmark = pytest.mark.ranks

HSDP = {"num_distributed_optimizer_instances": 2}
HFSDP = {**HSDP, "outer_dp_sharding_strategy": "optim"}
# Number of ranks, strategy and settings of the wrapper.
SHARDINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero1": (2, "optim", {}),
    "zero3": (3, "optim_grads_params", {}),
    "hsdp": (4, "optim_grads", HSDP),
    "hfsdp": (4, "optim_grads_params", HFSDP),
    "zero0": (2, "no_shard", {}),
    "zero0_instances": (4, "no_shard", HSDP),
}


def _matrices(model: Any) -> dict[str, tuple[Any, Any]]:
    """Describe every 2-D parameter: name to parameter and matrix."""
    from megatron_muon.mcore.fsdp_model import named_optimizer_parameters
    from megatron_muon.rows.parameters import PlannedParameter, tensor_shard_of

    return {
        fqn: (param, tensor_shard_of(PlannedParameter(fqn, param, param)))
        for fqn, param in named_optimizer_parameters([model])
        if param.dim() == 2
    }


def _compare_layouts(model: Any) -> list[Any]:
    import torch

    from megatron_muon.rows.megatron_fsdp import shard_group, tensor_shard_rows
    from megatron_muon.runtime.exchange import all_gather_rows

    wrong, num_empty = [], 0
    for fqn, (param, matrix) in _matrices(model).items():
        whole = model.whole_weights[fqn]
        start, stop = matrix.own_box[0]
        num_empty += start == stop
        if not torch.equal(param._local_tensor, whole[start:stop]):
            wrong.append(f"{fqn}: rows {start} to {stop}")
        group = shard_group(param)
        if group is not None:
            gathered = all_gather_rows(param._local_tensor, tensor_shard_rows(param), group)
            if not torch.equal(gathered, whole):
                wrong.append(f"{fqn}: gathered")
    return [wrong, num_empty]


def _step_on_shards(model: Any) -> list[str]:
    import torch
    from helpers.sharded_muon import with_local
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    chain = build_optimizer(model, muon_nesterov=True)
    (muon,) = chain.muon_step.optimizers
    with pytest.raises(RuntimeError, match="expected a step of FSDPMuonChainedOptimizer"):
        muon.step()
    shards = {fqn: pair for fqn, pair in _matrices(model).items() if pair[0] in muon.tensor_shards}
    whole = {fqn: torch.nn.Parameter(model.whole_weights[fqn].clone()) for fqn in shards}
    for fqn, (param, _) in shards.items():
        whole[fqn].is_qkv = getattr(param, "is_qkv", False)
    reference = TensorParallelMuon(
        whole.values(),
        lr=0.01,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.1,
        split_qkv=True,
        is_qkv_fn=lambda param: param.is_qkv,
        qkv_split_shapes=[8, 8, 8],
    )
    assert any(param.is_qkv for param in whole.values())
    for step in range(2):
        for index, (fqn, (param, matrix)) in enumerate(shards.items()):
            generator = torch.Generator().manual_seed(100 * step + index)
            grad = torch.randn(whole[fqn].shape, generator=generator).to(device())
            whole[fqn].grad = grad.clone()
            rows = grad[slice(*matrix.own_box[0])].clone()
            param.grad = with_local(param, rows) if rows.numel() else None
        chain.muon_step.step()
        reference.step()
    return [
        fqn
        for fqn, (param, matrix) in shards.items()
        if not torch.equal(param._local_tensor, whole[fqn][slice(*matrix.own_box[0])])
    ]


def _check(world_size: int) -> dict[str, list[Any]]:
    """Return by sharding the wrong rows, the number of empty shards, and the wrong updates."""
    found = {}
    for name, (num_ranks, sharding, settings) in SHARDINGS.items():
        if num_ranks == world_size:
            model = build_model(sharding, **settings)
            found[name] = [*_compare_layouts(model), _step_on_shards(model)]
    return found


@functools.cache
def results(world_size: int) -> list[dict[str, Any]]:
    """Return what each rank of a world found, which has all models of its size."""
    return run_ranks(world_size, _check, world_size).check().results


@pytest.mark.parametrize("name", SHARDINGS)
def test_step_on_megatron_fsdp_shards_equals_whole_matrices(name):
    """Local rows and the assembled matrix equal the weights from before they were sharded.

    The same gradients in, bit-identical parameters out, QKV split across shards included.
    """
    by_rank = [of_rank[name] for of_rank in results(SHARDINGS[name][0])]
    for wrong_rows, _, wrong_updates in by_rank:
        assert wrong_rows == [] and wrong_updates == []
    assert (sum(empty for _, empty, _ in by_rank) > 0) == (not name.startswith("zero0"))
