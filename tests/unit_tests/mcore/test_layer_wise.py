# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Why the layer-wise optimizer is refused on Megatron-FSDP models: what happens where it is not.

It deals whole parameters to ranks, steps them, and all-gathers them. Where every rank holds all
rows it could do that, after four changes of Megatron; where rows are sharded it cannot.
"""

from typing import Any

import pytest
from helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 4
CHANGES = ["buffers", "wrapped", "main_grad", "local"]


def _gather_local_tensors() -> None:
    """Let the layer-wise optimizer all-gather the local tensors of DTensor parameters."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    from megatron_muon.runtime.dtensor_layout import local_tensor

    original = LayerWiseDistributedOptimizer.allgather_params

    def allgather_params(self: Any) -> None:
        lists = self.dp_cp_params_list
        self.dp_cp_params_list = [[local_tensor(param) for param in params] for params in lists]
        original(self)
        self.dp_cp_params_list = lists

    LayerWiseDistributedOptimizer.allgather_params = allgather_params


def _train_with(changes: list[str], model: Any) -> list[float] | str:
    """Train with upstream's layer-wise Muon on whole DTensors; return losses, or how it ends."""
    from helpers.toy_fsdp import run_backward
    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    config = OptimizerConfig(
        optimizer="muon",
        lr=0.01,
        weight_decay=0.1,
        clip_grad=0.0,
        use_layer_wise_distributed_optimizer=True,
        # fp32 parameters are not wrapped, and the step misses a method.
        bf16="wrapped" in changes,
    )
    if "buffers" in changes:
        # Megatron-FSDP sets it; upstream then takes the method buffers() for DDP's buffers.
        model.ddp_config.use_distributed_optimizer = False
    if "local" in changes:
        _gather_local_tensors()
    build = mcore_optimizer._get_megatron_emerging_optimizer.__wrapped__
    losses = []
    try:
        optimizer = build(config, [model], get_standard_config_overrides(config), None)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model.zero_grad_buffer()
            losses.append(run_backward(model, seed=step))
            model.finish_grad_sync()
            for _, param in model.module.param_and_grad_buffer.optimizer_named_parameters:
                if "main_grad" in changes:
                    param.main_grad = param.grad
            optimizer.step()
            # Nobody else does.
            model.module.install_optimized_model_weights()
            model.start_param_sync()
    except (AttributeError, TypeError) as error:
        return str(error)
    return losses


def _train_with_more_and_more() -> list[list[float] | str]:
    from helpers.toy_fsdp import build_model

    model = build_model("no_shard")
    return [_train_with(CHANGES[:count], model) for count in (0, 1, 2)]


def _train_with_all() -> list[float] | str:
    from helpers.toy_fsdp import build_model

    return _train_with(CHANGES, build_model("no_shard"))


def _train_without_the_last() -> str:
    from helpers.toy_fsdp import build_model

    with pytest.raises(NotImplementedError) as error:
        _train_with(CHANGES[:3], build_model("no_shard"))
    return str(error.value)


def _losses_of_ours() -> list[float]:
    from helpers.toy_fsdp import build_model, build_optimizer, run_backward

    model = build_model("no_shard")
    optimizer = build_optimizer(model, clip_grad=0.0)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(run_backward(model, seed=step))
        optimizer.step()
    return losses


@pytest.mark.slow
def test_whole_parameters_need_four_changes_of_megatron():
    """Each of the first three only leads to the next."""
    for found in run_ranks(2, _train_with_more_and_more).check().results:
        assert "'method' object is not iterable" in found[0]
        assert "'TensorParallelMuon' object has no attribute 'prepare_grads'" in found[1]
        assert "'DTensor' object has no attribute 'main_grad'" in found[2]
    for text in run_ranks(2, _train_without_the_last).check().results:
        assert "allgather_" in text


def test_with_all_changes_it_trains_like_ours():
    """Under no_shard, to the last digit: the refusal loses nothing but this."""
    theirs = run_ranks(2, _train_with_all).check().results
    ours = run_ranks(2, _losses_of_ours).check().results
    assert theirs == ours and len(theirs[0]) == NUM_STEPS


def _gather_sharded() -> bool:
    """All-gather one parameter of equal row shards that rank 0 owns; was rank 1's part lost?"""
    import torch
    import torch.distributed as dist
    from helpers.sharded_muon import init_group
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    init_group()
    _gather_local_tensors()
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.full((4, 3), float(dist.get_rank()))
    param = torch.nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]))
    optimizer = LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer)
    optimizer.pg_collection = object()
    optimizer.dp_cp_params_list, optimizer.expt_dp_params_list = [[param], []], None
    optimizer.dp_cp = dist.group.WORLD
    optimizer.allgather_params()
    return bool((param._local_tensor == 0.0).all())


def test_sharded_rows_are_overwritten_by_those_of_another_rank():
    """Without a word: every rank ends with the rows of the rank that a parameter was dealt to."""
    assert run_ranks(2, _gather_sharded).check().results == [True, True]
