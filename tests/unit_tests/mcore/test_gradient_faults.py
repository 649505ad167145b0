# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are missing, not finite or too large, and the norm they are clipped by."""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from helpers.ranks import run_ranks
from helpers.toy_fsdp import (
    are_equal,
    build_model,
    build_optimizer,
    main_weights,
    model_weights,
    run_backward,
)

pytestmark = pytest.mark.ranks

# A gradient of Muon, and one of Adam, by optimizer and name.
OWNERS = {
    "embedding.position_embeddings.weight": "FSDPZeROTensorParallelMuon",
    "output_layer.weight": "AdamW",
}
FAULTS = {
    "missing": "expected a gradient on a shard",
    "frozen": "expected a gradient on a shard",
    "nan": "expected a finite gradient, got NaN",
    "inf": "expected a finite gradient, got NaN or Inf",
}


def _keep_norm_on_device() -> None:
    """Stand in for Transformer Engine's kernel, with which upstream reads no norm on the host."""
    from megatron.core.optimizer import clip_grads

    def scale(chunk_size: int, overflow: Any, tensors: Any, factor: Any) -> None:
        for source, target in zip(*tensors, strict=True):
            target.copy_(source * factor)

    clip_grads.multi_tensor_scale_tensor_impl = scale


def _step_with(fault: str, name: str, model: Any, optimizer: Any) -> list[Any]:
    """Step with a fault in a gradient of rank 1."""
    import torch
    import torch.distributed as dist

    model.finish_grad_sync()
    owner = next(
        child
        for child in optimizer.chained_optimizers
        if type(child.optimizer).__name__ == OWNERS[name]
    )
    for param in owner.get_parameters():
        if dist.get_rank() == 1 and optimizer._fqns[param] == name:
            assert param.grad is not None
            param.requires_grad_(fault != "frozen")
            if fault in ("missing", "frozen"):
                param.grad = None
            else:
                param.grad._local_tensor[-1, -1] = float(fault)
    installed, state = model_weights(model), _states(optimizer)
    text, is_same = _refused(optimizer.step, model)
    return [
        text,
        is_same
        and all(map(torch.equal, state, _states(optimizer)))
        and all(map(torch.equal, installed, model_weights(model))),
    ]


def _states(optimizer: Any) -> list[Any]:
    """Copy this rank's part of every state tensor of all optimizers."""
    from torch.distributed.tensor import DTensor

    return [
        (value._local_tensor if isinstance(value, DTensor) else value).clone()
        for child in optimizer.chained_optimizers
        for state in child.optimizer.state.values()
        for value in state.values()
    ]


def _refused(step: Callable[[], Any], model: Any) -> list[Any]:
    """Return the error of a step, and whether main weights are as before."""
    before = main_weights(model)
    with pytest.raises(RuntimeError) as error:
        step()
    return [str(error.value), all(are_equal(before, main_weights(model)))]


def _lose_gradient_after_they_were_listed(model: Any, optimizer: Any) -> list[Any]:
    import torch.distributed as dist

    optimizer.prepare_grads()
    (muon,) = optimizer.muon_step.optimizers
    if dist.get_rank() == 1:
        next(param for param in muon.params if param.grad is not None).grad = None
    return _refused(optimizer.step_with_ready_grads, model)


def _lack_memory(model: Any, optimizer: Any) -> list[Any]:
    import torch
    import torch.distributed as dist

    from megatron_muon.runtime.arena import Arena

    model.finish_grad_sync()
    # As a GPU fails.
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(Arena, "allocate", side_effect=error))
        found = _refused(optimizer.step, model)
    is_same = found[1] and optimizer.step()[0]
    return [found[0], is_same]


def _exceed_float32(model: Any, optimizer: Any) -> list[Any]:
    optimizer.prepare_grads()
    gradients = [
        param.grad._local_tensor
        for child in optimizer.chained_optimizers
        for param in child.get_parameters()
        if param.grad is not None and param.grad._local_tensor.numel() > 0
    ]
    largest = max(gradient.numel() for gradient in gradients)
    for gradient in gradients:
        gradient.fill_(math.sqrt(2e38 / largest))
    return _refused(optimizer.step, model)


def _lose_parameter(model: Any, optimizer: Any) -> list[Any]:
    import torch.distributed as dist

    model.finish_grad_sync()
    (muon,) = optimizer.muon_step.optimizers
    if dist.get_rank() == 1:
        muon.param_groups[0]["params"].pop()
    return _refused(optimizer.step, model)


# What is said, by case; the last one leaves the optimizer broken.
REFUSED: list[tuple[Callable[..., list[Any]], str]] = [
    # If nobody asks for the norm, gradients are checked once more before the step.
    (_lose_gradient_after_they_were_listed, r"rank 1: .*expected a gradient on a shard of shape"),
    # Before anything is sent, where the others would wait for it; the next step may go on.
    (_lack_memory, r"rank 1: CUDA out of memory. Tried to allocate 8.00 GiB"),
    # Each gradient is finite, and so is its own norm; the square of the norm of all is not.
    (_exceed_float32, r"gradient norm: expected a finite one, got inf"),
    # The exchange was planned for the parameters of construction.
    (_lose_parameter, r"rank 1: param_groups: expected the 9 parameters .*Nothing was updated"),
]


def _step_with_all_faults() -> dict[str, list[Any]]:
    """Run backward before each step of one model, with faults and without."""
    model = build_model()
    optimizer = build_optimizer(model)
    found = {}

    def run(name: str, step: Callable[..., list[Any]]) -> None:
        optimizer.zero_grad()
        run_backward(model)
        found[name] = step(model, optimizer)

    for place in ("host", "device"):
        if place == "device":
            _keep_norm_on_device()
        for fault, name in itertools.product(FAULTS, OWNERS):
            run(f"{fault} {name} {place}", functools.partial(_step_with, fault, name))
        optimizer.config.grad_norm_skip_threshold = 1e9
        run(f"above threshold {place}", functools.partial(_step_with, "nan", next(iter(OWNERS))))
        optimizer.config.grad_norm_skip_threshold = float("inf")
        run(f"after {place}", lambda model, optimizer: [optimizer.step()[0]])
        if place == "host":
            for case, _ in REFUSED[:-1]:
                run(case.__name__, case)
    run(REFUSED[-1][0].__name__, REFUSED[-1][0])
    return found


@functools.cache
def steps() -> list[dict[str, list[Any]]]:
    """Return what each rank found, by case."""
    return run_ranks(2, _step_with_all_faults, timeout_s=120.0).check().results


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("norm_is_on", ["host", "device"])
def test_faulty_gradient_raises_on_all_ranks(norm_is_on, name, fault):
    """Neither Muon nor Adam moves when one rank lost a gradient of either, or has a NaN in it.

    Clipping by a norm that is NaN would carry it into every parameter. Where it is launched before
    the host knows, the message still names the gradient that was at fault.
    """
    for found in steps():
        text, is_same = found[f"{fault} {name} {norm_is_on}"]
        assert f"rank 1: {name}: {FAULTS[fault]}" in text and is_same


@pytest.mark.parametrize("norm_is_on", ["host", "device"])
def test_fault_is_not_taken_for_a_norm_above_the_threshold(norm_is_on):
    """Upstream skips such steps; one with a NaN would be skipped for ever, without an error."""
    for found in steps():
        text, is_same = found[f"above threshold {norm_is_on}"]
        assert f"rank 1: {next(iter(OWNERS))}: {FAULTS['nan']}" in text and is_same


def test_step_after_faults_trains():
    """Whoever drops the faulty gradients may go on with the same optimizer."""
    assert all(found["after host"] == found["after device"] == [True] for found in steps())


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_step_that_fails_on_one_rank_changes_nothing(case, message):
    """The same error on every rank, and the same main weights."""
    for found in steps():
        text, is_same = found[case.__name__]
        assert re.search(message, text, re.DOTALL) and is_same
