# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Row sharding of a real Megatron-FSDP model, and the steps of Muon and Lion on its shards."""

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import cached_cases
from helpers.sharded_muon import Optimizers, step_both
from helpers.toy_fsdp import build_model, build_optimizer
from torch.distributed.tensor import DTensor

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


def _matrices(model: Any) -> list[tuple[Any, Any]]:
    """Return every 2-D parameter with its rows, which this package reads from the buffer."""
    from megatron_muon.mcore.fsdp_model import named_optimizer_parameters
    from megatron_muon.rows.parameters import PlannedParameter, tensor_shard_of

    return [
        (param, tensor_shard_of(PlannedParameter(fqn, param, param)))
        for fqn, param in named_optimizer_parameters([model])
        if param.dim() == 2
    ]


def _wrong_rows(model: Any) -> list[str]:
    """Compare local rows, and the assembled matrix, with the weights before they were sharded."""
    from megatron_muon.rows.megatron_fsdp import shard_group, tensor_shard_rows
    from megatron_muon.runtime.exchange import all_gather_rows

    wrong = []
    for param, part in _matrices(model):
        whole = model.whole_weights[part.name]
        start, stop = part.own_box[0]
        if not torch.equal(param._local_tensor, whole[start:stop]):
            wrong.append(f"{part.name}: rows {start} to {stop}")
        group = shard_group(param)
        if group is not None:
            gathered = all_gather_rows(param._local_tensor, tensor_shard_rows(param), group)
            if not torch.equal(gathered, whole):
                wrong.append(f"{part.name}: gathered")
    return wrong


def _step_muon(model: Any, chain: Any) -> list[str]:
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    (muon,) = chain.muon_step.optimizers
    with pytest.raises(RuntimeError, match="expected a step of FSDPMuonChainedOptimizer"):
        muon.step()
    muon.step = chain.muon_step.step
    params = []
    for param, part in _matrices(model):
        if param in muon.tensor_shards:
            whole = torch.nn.Parameter(model.whole_weights[part.name].clone())
            whole.is_qkv = getattr(param, "is_qkv", False)
            params.append((param, whole, part))
    assert any(whole.is_qkv for _, whole, _ in params)
    reference = TensorParallelMuon(
        [whole for _, whole, _ in params],
        lr=0.01,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.1,
        split_qkv=True,
        is_qkv_fn=lambda param: param.is_qkv,
        qkv_split_shapes=[8, 8, 8],
    )
    optimizers = Optimizers(muon, reference, params)
    step_both(optimizers, "fp32", num_steps=2)
    return optimizers.differences()


def _step_lion(model: Any, chain: Any, sharding: str) -> list[Any]:
    """Step Lion's shards and upstream's whole parameters.

    Returns:
        Differences, types that Lion's updates see, the number of updates that its shards with rows
        should have and have, and whether its state is still made of the first DTensors.
    """
    from emerging_optimizers.scalar_optimizers import Lion

    from megatron_muon.mcore.fsdp_model import named_optimizer_parameters
    from megatron_muon.step.lion import FSDPLion

    inners = [child.optimizer for child in chain.chained_optimizers]
    (lion,) = [inner for inner in inners if isinstance(inner, FSDPLion)]
    names = {param: name for name, param in named_optimizer_parameters([model])}
    params, groups = [], []
    for group in lion.param_groups:
        groups.append({**group, "params": []})
        for param in group["params"]:
            whole = torch.nn.Parameter(model.whole_weights[names[param]].clone())
            groups[-1]["params"].append(whole)
            part = SimpleNamespace(name=names[param], own_box=[_own_rows(param, sharding)])
            params.append((param, whole, part))
    optimizers = Optimizers(lion, Lion(groups), params, key="exp_avg")
    states = [lion.state[param]["exp_avg"] for param, _, _ in params]
    with mock.patch("torch._foreach_lerp", wraps=torch._foreach_lerp) as lerp:
        step_both(optimizers, "fp32")
    updates = [call.args[:2] for call in lerp.call_args_list]
    seen = {type(each).__name__ for call in updates for tensors in call for each in tensors}
    return [
        optimizers.differences(),
        sorted(seen),
        3 * sum(param._local_tensor.numel() > 0 for param, _, _ in params),
        sum(len(averages) for averages, _ in updates),
        all(
            isinstance(state, DTensor) and lion.state[param]["exp_avg"] is state
            for state, (param, _, _) in zip(states, params, strict=True)
        ),
    ]


def _own_rows(param: Any, sharding: str) -> tuple[int, int]:
    """Return the rows of a matrix or vector that Megatron-FSDP says this rank holds."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    if sharding == "no_shard":
        return (0, param.shape[0])
    uneven_dtensor.update_uneven_dtensor_chunk_metadata(param)
    if param._local_tensor.numel() == 0:
        return (0, 0)
    (chunk,) = param._local_tensor.__create_chunk_list__()
    return (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])


def _step(sharding: str, settings: dict[str, Any]) -> list[Any]:
    """Return the wrong rows, the number of empty shards, and results of both steps."""
    model = build_model(sharding, **settings)
    wrong_rows = _wrong_rows(model)
    num_empty = sum(param._local_tensor.numel() == 0 for param, _ in _matrices(model))
    chain = build_optimizer(model, muon_nesterov=True, muon_scalar_optimizer="lion")
    return [wrong_rows, num_empty, _step_muon(model, chain), _step_lion(model, chain, sharding)]


results = cached_cases(
    {
        world_size: {
            name: functools.partial(_step, sharding, settings)
            for name, (size, sharding, settings) in SHARDINGS.items()
            if size == world_size
        }
        for world_size in (2, 3, 4)
    }
)


@pytest.mark.parametrize("name", SHARDINGS)
def test_steps_on_megatron_fsdp_shards_equal_whole_matrices(name):
    """Muon and Lion on Megatron-FSDP's shards have the bits of whole parameters."""
    by_rank = results(SHARDINGS[name][0])[name]
    for wrong_rows, _, of_muon, of_lion in by_rank:
        assert wrong_rows == [] and of_muon == []
        different, seen, num_expected, num_updates, is_kept = of_lion
        assert different == []
        assert seen == ["Tensor"]
        assert num_updates == num_expected
        assert is_kept
    assert (sum(empty for _, empty, _, _ in by_rank) > 0) == (not name.startswith("zero0"))
