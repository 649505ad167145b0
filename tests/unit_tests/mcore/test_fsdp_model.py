# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Real models of Megatron-FSDP: rows, attributes, steps of Muon and Lion, and collectives."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.device import kind
from helpers.megatron_fsdp import ShardedNet
from helpers.ranks import cached_cases, on_ranks
from helpers.sharded_muon import Optimizers, step_both
from helpers.toy_fsdp import build_model, build_optimizer, run_backward
from torch.distributed.tensor import DTensor, Partial

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
    from megatron_muon.rows.megatron_fsdp import shard_group

    wrong = []
    for param, part in _matrices(model):
        whole = model.whole_weights[part.name]
        start, stop = part.own_box[0]
        if not torch.equal(param._local_tensor, whole[start:stop]):
            wrong.append(f"{part.name}: rows {start} to {stop}")
        group = shard_group(param)
        if group is not None:
            gathered = torch.zeros_like(whole)
            gathered[start:stop] = param._local_tensor
            dist.all_reduce(gathered, group=group)
            if not torch.equal(gathered, whole):
                wrong.append(f"{part.name}: gathered")
    return wrong


def _step_muon(model: Any, chain: Any) -> list[str]:
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    (muon,) = chain.muon_step.optimizers
    with pytest.raises(RuntimeError, match="expected a step of FSDPMuonChainedOptimizer"):
        muon.step()
    muon.step = chain.muon_step.step
    own = {param for group in muon.param_groups for param in group["params"]}
    params = []
    for param, part in _matrices(model):
        if param in own:
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
    model = build_model(sharding, **settings)
    wrong_rows = _wrong_rows(model)
    num_empty = sum(param._local_tensor.numel() == 0 for param, _ in _matrices(model))
    chain = build_optimizer(model, muon_nesterov=True, muon_scalar_optimizer="lion")
    return [wrong_rows, num_empty, _step_muon(model, chain), _step_lion(model, chain, sharding)]


def _sharded(layout: str) -> tuple[list[Any], Any]:
    """Return two sharded matrices and what holds them."""
    net = ShardedNet(layout, [(12, 6), (7, 4)], has_bias=False)
    params = list(net.matrices.values())
    return params, params[0]._mfsdp_parameter_group


def _copy_attributes() -> None:
    """Upstream's rules read them of what optimizers see, and v2 leaves them on the other one."""
    from megatron_muon.mcore.fsdp_model import copy_parameter_attributes

    (param, *_), group = _sharded("zero3")
    unsharded = group.unsharded_parameters[0]
    unsharded.allreduce, unsharded.partition_dim, unsharded._private = False, 1, 1
    copy_parameter_attributes(param)
    assert not param.allreduce and param.partition_dim == 1
    assert not hasattr(param, "_private") and getattr(param, "__fsdp_param__", False)


def _cast() -> None:
    """bf16 gradients of fp32 weights; one that HSDP did not reduce would let replicas drift."""
    from megatron_muon.mcore.chunks import sharded_chunk

    (first, second), group = _sharded("hsdp")
    group.sync_model_weight_from_main_weight = mock.Mock()
    model = torch.nn.Module()
    model.first, model.second, model.config = first, second, None
    chunk = sharded_chunk(model)
    for param, placement in ((first, first.placements[0]), (second, Partial("sum"))):
        param.grad_dtype = torch.bfloat16
        param.grad = DTensor.from_local(
            param._local_tensor.detach().to(torch.bfloat16),
            param.device_mesh,
            [placement, param.placements[1]],
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    (problem,) = chunk.finish_gradients()
    assert problem.startswith("second: expected a gradient with placem")
    assert first.grad.dtype == torch.float32
    # The next backward pass attaches gradients of the old dtype.
    first.grad = first.grad.to(torch.bfloat16)
    chunk.install_weights()
    assert group.sync_model_weight_from_main_weight.call_count == 1
    chunk.zero_gradients()
    assert first.grad is None


NAMES = (
    *("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather", "reduce_scatter", "broadcast", "barrier", "all_gather_object", "new_group"),
)


@contextmanager
def _logged(log: list[list[Any]]) -> Iterator[None]:
    """Note each collective: its name, the dtype and elements it is given, the size of its group."""

    def note(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        num_ranks = dist.get_world_size(kwargs.get("group")) if name != "new_group" else 0
        entry = [name, "", 0, num_ranks]
        tensors = [each for each in args[:2] if isinstance(each, torch.Tensor)]
        if tensors:
            entry[1:3] = [str(tensors[-1].dtype).removeprefix("torch."), tensors[-1].numel()]
        log.append(entry)
        return original(*args, **kwargs)

    with ExitStack() as stack:
        for name in NAMES:
            noted = functools.partial(note, name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, noted))
        yield


# World, strategy and settings; ranks that the norm is summed over, and replicas.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], int, int]] = {
    "zero3": (2, "optim_grads_params", {}, 2, 0),
    "zero0": (2, "no_shard", {}, 1, 2),
    "hsdp": (4, "optim_grads_params", HSDP, 2, 2),
}


def _trace(sharding: str, settings: dict[str, Any]) -> list[Any]:
    model = build_model(sharding, **settings)
    construction: list[list[Any]] = []
    with _logged(construction):
        optimizer = build_optimizer(model)
    log: list[list[Any]] = []
    for step in range(2):
        optimizer.zero_grad()
        run_backward(model)
        model.finish_grad_sync()
        with _logged(log if step == 1 else []):
            optimizer.step()
    (plan,) = optimizer.muon_step.engine.plans
    num_blocks = sum(len(matrix.blocks) for matrix in plan.matrices)
    return [construction, log, len(plan.buckets), num_blocks]


CASES: dict[int, dict[str, Any]] = {
    2: {},
    3: {},
    4: {},
}
for _name, (_size, *_args) in SHARDINGS.items():
    CASES[_size][_name] = functools.partial(_step, *_args)
if kind() == "cpu":
    CASES[4] |= {"attributes": _copy_attributes, "gradients": _cast}
for _name, (_size, _sharding, _settings, _, _) in LAYOUTS.items() if kind() == "cpu" else ():
    CASES[_size][f"collectives {_name}"] = functools.partial(_trace, _sharding, _settings)
results = cached_cases(CASES)


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


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["attributes", "gradients"])
def test_shards_have_attributes_of_megatron_and_gradients_in_fp32(name):
    """Shards get Megatron's attributes; gradients are cast, or refused if replicas differ."""
    assert results(4)[name] == [None] * 4


@pytest.mark.cpu_only
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_those_of_the_document(layout):
    """A step makes the collectives of docs/communication.md."""
    world_size, sharding, _, num_norm_ranks, num_replicas = LAYOUTS[layout]
    for construction, step, num_buckets, num_blocks in results(world_size)[f"collectives {layout}"]:
        assert num_buckets > 0
        num_gathers = 0 if sharding == "no_shard" else num_buckets
        messages = [["all_to_all_single", "bfloat16", world_size]]
        spread = [["all_gather_into_tensor", "bfloat16", num_replicas]] if num_replicas else []
        count = num_gathers + num_buckets * (1 + len(spread))
        assert step[:3] == [
            ["all_reduce", "float32", 1, num_norm_ranks],
            # A checksum of the values of groups; NaN where the norm is not finite.
            ["all_reduce", "float64", 1, world_size],
            ["all_reduce", "float64", num_blocks, world_size],
        ]
        exchange = [[name, dtype, ranks] for name, dtype, _, ranks in step[3 : 3 + count]]
        assert sorted(exchange) == sorted(
            messages * num_gathers + (messages + spread) * num_buckets
        )
        # Megatron-FSDP's, of weights.
        assert {entry[0] for entry in step[3 + count :]} <= {"all_gather_into_tensor"}
        # One element for every rank that rows go to, and results; under ZeRO-0 no rows travel.
        connect = [entry for entry in construction if entry[0] == "all_to_all_single"]
        assert len(connect) == 1
        assert all(num_elements < world_size for _, _, num_elements, _ in connect)
        # All else is flags, hashes, and tables of groups. Replicas connect too.
        assert Counter(name for name, *_ in construction) == Counter(
            all_reduce=8,
            all_gather_object=4,
            all_gather_into_tensor=4 + (num_replicas > 0),
            all_to_all_single=len(connect),
        )
        flags = [entry[1:] for entry in construction if entry[0] == "all_reduce"]
        # One is the staging memory of the fullest rank.
        assert sorted(flags) == [["int32", 1, world_size]] * 7 + [["int64", 1, world_size]]


@on_ranks(1)
def test_bf16_shards_of_fsdp2_are_refused():
    """A script's bf16 model has shards without the bits of main weights; steps would be lost."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from torch.distributed.fsdp import fully_shard

    from megatron_muon.mcore.fsdp_model import check_model_chunks

    class Wrapper(TorchFullyShardedDataParallel):
        def __init__(self, dtype: torch.dtype) -> None:
            torch.nn.Module.__init__(self)
            mesh = dist.init_device_mesh(kind(), (1,))
            self.module = fully_shard(torch.nn.Linear(4, 4, dtype=dtype), mesh=mesh)

    check_model_chunks([Wrapper(torch.float32)])
    with pytest.raises(ValueError, match=r"weight: expected float32 shards, got torch\.bfloat16"):
        check_model_chunks([Wrapper(torch.bfloat16)])
