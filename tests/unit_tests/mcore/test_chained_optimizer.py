# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The step of FSDPMuonChainedOptimizer over a real Megatron-FSDP model."""

import contextlib
import copy
import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import cached_cases
from helpers.toy_fsdp import (
    are_equal,
    build_model,
    build_optimizer,
    main_weights,
    model_weights,
    run_backward,
)
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.ranks

HSDP = {"num_distributed_optimizer_instances": 2}


def _error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "no error"


def _step_alone() -> None:
    """A bare loop of backward and step() trains; every parameter has state from the start.

    Empty shards have momentum too: ranks with different sets of state hang the save.
    """
    model = build_model()
    optimizer = build_optimizer(model)
    keys = set()
    params = [param for child in optimizer.chained_optimizers for param in child.get_parameters()]
    assert len(params) == len(main_weights(model))
    for child in optimizer.chained_optimizers:
        for param in child.get_parameters():
            for key, value in child.optimizer.state[param].items():
                keys.add(key)
                if key != "step":
                    assert isinstance(value, DTensor) and value.placements == param.placements
                    assert value._local_tensor.shape == param._local_tensor.shape
    assert keys == {"exp_avg", "exp_avg_sq", "momentum_buffer", "step"}
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        losses.append(run_backward(model))
        before = main_weights(model)
        success, grad_norm, _ = optimizer.step()
        assert success and grad_norm > 0
        # An empty shard equals itself whatever happens.
        moved = [not same for same in are_equal(before, main_weights(model))]
        held = [weight.numel() > 0 for weight in before.values()]
        assert moved == held, (step, moved, held)
    assert losses[0] == pytest.approx(math.log(48), rel=0.1)
    assert losses[-1] < losses[0] - 0.05
    assert optimizer.get_loss_scale() == 1.0


def _skip_a_step() -> None:
    """Above --grad-norm-skip-threshold nothing moves, and the next forward pass still runs."""
    model = build_model()
    optimizer = build_optimizer(model, grad_norm_skip_threshold=1e-9)
    run_backward(model)
    before, installed = main_weights(model), model_weights(model)
    success, grad_norm, _ = optimizer.step()
    assert not success and grad_norm > 1e-9
    assert all(are_equal(before, main_weights(model)))
    assert all(map(torch.equal, installed, model_weights(model)))
    assert math.isfinite(run_backward(model))


def _fail_in_the_second_optimizer() -> None:
    """A step that was tried again went on from momentum that had changed, without a word."""
    from megatron_muon.runtime.agreement import INTERRUPTED

    model = build_model()
    optimizer = build_optimizer(model)
    run_backward(model)
    installed = model_weights(model)
    saved = copy.deepcopy(optimizer.state_dict())
    assert len(optimizer.chained_optimizers) == 2
    inner = optimizer.chained_optimizers[-1].optimizer
    with mock.patch.object(inner, "step", side_effect=KeyError), pytest.raises(KeyError):
        optimizer.step()
    assert all(map(torch.equal, installed, model_weights(model)))
    run_backward(model)
    assert INTERRUPTED in _error_of(optimizer.step)
    optimizer.load_state_dict(saved)
    assert optimizer.step()[0]


def _count_installs() -> None:
    """Children would install and gather once each; a second reduction would be wrong."""
    model = build_model()
    optimizer = build_optimizer(model)
    with contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(mock.patch.object(holder, name, wraps=getattr(holder, name)))
            for holder, name in (
                (model.module, "install_optimized_model_weights"),
                (model, "start_param_sync"),
                (model, "finish_grad_sync"),
            )
        ]
        run_backward(model)
        optimizer.step()
        run_backward(model)
        model.finish_grad_sync()
        optimizer.step()
    assert [each.call_count for each in calls] == [2, 2, 2]


def _reload(sharding: str) -> None:
    """After a model-only load the model computes with the main weights, on every shard."""
    model = build_model(sharding)
    optimizer = build_optimizer(model)
    run_backward(model)
    optimizer.step()
    buffers = model.param_and_grad_buffer
    for _, param in buffers.optimizer_named_parameters:
        param._local_tensor.fill_(0.25)
    optimizer.reload_model_params()
    for group in buffers.parameter_groups:
        for param in group.params:
            weights = group.model_weight_buffer
            item = weights.get_item(weights.param_idx[param], only_shard=True)
            assert bool((item == 0.25).all())
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert torch.is_tensor(optimizer.get_loss_scale())


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        *((world_size, "step alone") for world_size in (1, 2, 3)),
        *((2, case) for case in ("skipped", "failed", "installs", "reload optim", "reload zero3")),
    ],
)
def test_step_without_a_training_loop(world_size, case):
    """Steps in a script train, are skipped, fail, install weights and reload them."""
    assert results(world_size)[case] == [None] * world_size


MICROBATCHES = [
    ([False, True], "no error"),
    ([False, False], "reduced once over the outer ranks, got [0] times"),
    ([True], "no error"),
    ([True, True], "reduced once over the outer ranks, got [2] times"),
]


def _reduce_over_outer_ranks() -> list[str]:
    model = build_model("optim", **HSDP)
    optimizer = build_optimizer(model)
    texts = []
    for are_last, _ in MICROBATCHES:
        optimizer.zero_grad()
        if len(are_last) == 1:
            # The rerun state machine runs forward and backward again after zeroing the gradients.
            run_backward(model)
            optimizer.zero_grad()
        for is_last in are_last:
            run_backward(model, is_last=is_last)
        before = main_weights(model)
        texts.append(_error_of(optimizer.step))
        assert all(are_equal(before, main_weights(model))) == (texts[-1] != "no error")
    return texts


def test_hsdp_reduces_over_outer_ranks_once_or_raises():
    """Gradients of HSDP that were not reduced exactly once over outer ranks are refused."""
    for texts in results(4)["outer ranks"]:
        for (_, message), text in zip(MICROBATCHES, texts, strict=True):
            assert message in text


# The type decides rather than attribute names; version 2 has no wrapper of Megatron; after a
# forward pass the module holds raw parameters, and a step of those would train nothing.
REFUSED = {
    # Its gradients lack the repairs.
    "wrapped before enable()": "got one that was wrapped before",
    # Two of the table that test_arguments.py has.
    "name": "expected a class, or one of",
    "layer-wise": "Megatron-FSDP has already sharded",
    "type": "FullyShardedDataParallel, got LooksLikeFSDP",
    "version 2": "FullyShardedDataParallel, got Sequential",
    # Replicas would differ.
    "kernels timed on rank 1": "rank 1: PYTORCH_TUNABLEOP_ENABLED: expected 0(?s:.*)No optimizer",
    "late": "Build the optimizer before the first forward pass",
}


def _refuse() -> dict[str, str]:
    """Build optimizers of settings and models that cannot be stepped, in the table's order."""
    import megatron_muon

    class LooksLikeFSDP(torch.nn.Linear):
        def finish_grad_sync(self) -> None: ...

        def install_optimized_model_weights(self) -> None: ...

    megatron_muon.disable()
    with mock.patch.object(megatron_muon, "enable"):
        unrepaired = build_model()
    found = [_error_of(build_optimizer, unrepaired)]
    model = build_model()
    for settings in ({"optimizer": "sope"}, {"use_layer_wise_distributed_optimizer": True}):
        found.append(_error_of(build_optimizer, model, **settings))
    build = megatron_muon.build_megatron_fsdp_emerging_optimizer
    found.append(_error_of(build, None, [LooksLikeFSDP(2, 2)]))
    sharded = torch.nn.Linear(2, 2)
    sharded.weight._mfsdp_parameter_group = None
    found.append(_error_of(build_optimizer, torch.nn.Sequential(sharded)))
    with mock.patch.dict(os.environ, {"PYTORCH_TUNABLEOP_ENABLED": str(dist.get_rank())}):
        found.append(_error_of(build_optimizer, model))
    run_backward(model)
    found.append(_error_of(build_optimizer, model))
    return dict(zip(REFUSED, found, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_settings_and_models_that_cannot_be_stepped_are_refused(name):
    """A script on megatron-core alone meets the refusals of a command line, on all ranks."""
    for found in results(2)["refused"]:
        assert re.search(REFUSED[name], found[name])


CASES = {
    1: {"step alone": _step_alone},
    2: {
        "step alone": _step_alone,
        "skipped": _skip_a_step,
        "installs": _count_installs,
        "reload optim": functools.partial(_reload, "optim"),
        "reload zero3": functools.partial(_reload, "optim_grads_params"),
        "refused": _refuse,
        "failed": _fail_in_the_second_optimizer,
    },
    3: {"step alone": _step_alone},
    4: {"outer ranks": _reduce_over_outer_ranks},
}
results = cached_cases(CASES)
