# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are missing, not finite or too large, and the norm they are clipped by."""

import contextlib
import functools
import math
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

MATRIX = ("FSDPZeROTensorParallelMuon", "embedding.position_embeddings.weight")
OUTPUT_LAYER = ("AdamW", "output_layer.weight")
FAULTS = ("missing", "frozen", "nan", "inf")


def _keep_norm_on_device() -> None:
    """Stand in for Transformer Engine's kernel, with which upstream reads no norm on the host."""
    from megatron.core.optimizer import clip_grads

    def scale(chunk_size: int, overflow: Any, tensors: Any, factor: Any) -> None:
        for source, target in zip(*tensors, strict=True):
            target.copy_(source * factor)

    clip_grads.multi_tensor_scale_tensor_impl = scale


def _break_gradients(norm_is_on_device: bool) -> dict[str, Any]:
    """Step with each fault in a gradient of rank 1, then once without."""
    if norm_is_on_device:
        _keep_norm_on_device()
    model = build_model()
    optimizer = build_optimizer(model)
    found: dict[str, Any] = {}
    for fault in FAULTS:
        for kind, name in (MATRIX, OUTPUT_LAYER):
            optimizer.zero_grad()
            run_backward(model)
            model.finish_grad_sync()
            found[f"{fault} {name}"] = _step_with(fault, kind, name, model, optimizer)
    optimizer.zero_grad()
    run_backward(model)
    found["success"], *_ = optimizer.step()
    return found


def _step_with(fault: str, kind: str, name: str, model: Any, optimizer: Any) -> list[Any]:
    import torch
    import torch.distributed as dist

    owner = next(
        child for child in optimizer.chained_optimizers if type(child.optimizer).__name__ == kind
    )
    for param in owner.get_parameters():
        if dist.get_rank() == 1 and optimizer._fqns[param] == name:
            assert param.grad is not None
            param.requires_grad_(fault != "frozen")
            if fault in ("missing", "frozen"):
                param.grad = None
            else:
                param.grad._local_tensor[-1, -1] = float(fault)
    before, installed = main_weights(model), model_weights(model)
    state = _states(optimizer)
    try:
        optimizer.step()
    except RuntimeError as error:
        return [
            str(error),
            all(are_equal(before, main_weights(model)))
            and all(map(torch.equal, state, _states(optimizer))),
            all(map(torch.equal, installed, model_weights(model))),
        ]
    return ["no error", False, False]


def _states(optimizer: Any) -> list[Any]:
    """Copy this rank's part of every state tensor of all optimizers."""
    from torch.distributed.tensor import DTensor

    return [
        (value._local_tensor if isinstance(value, DTensor) else value).clone()
        for child in optimizer.chained_optimizers
        for state in child.optimizer.state.values()
        for value in state.values()
    ]


@functools.cache
def steps_with_faults(norm_is_on_device: bool) -> list[dict[str, Any]]:
    """Run all faults in one world."""
    return run_ranks(2, _break_gradients, norm_is_on_device).check().results


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "expected a gradient on a shard"),
        ("frozen", "expected a gradient on a shard"),
        ("nan", "expected a finite gradient, got NaN"),
        ("inf", "expected a finite gradient, got NaN or Inf"),
    ],
)
@pytest.mark.parametrize("name", [MATRIX[1], OUTPUT_LAYER[1]])
@pytest.mark.parametrize("norm_is_on_device", [False, True])
def test_faulty_gradient_raises_on_all_ranks_whichever_optimizer_owns_it(
    norm_is_on_device, fault, message, name
):
    """Neither Muon nor Adam moves when one rank lost a gradient of either, or has a NaN in it.

    Clipping by a norm that is NaN would carry it into every parameter. Where it is launched before
    the host knows, the message still names the gradient that was at fault.
    """
    for found in steps_with_faults(norm_is_on_device):
        text, same, unchanged = found[f"{fault} {name}"]
        assert f"rank 1: {name}: {message}" in text
        assert same and unchanged


def test_step_after_faults_trains():
    """Whoever drops the faulty gradients may go on with the same optimizer."""
    for norm_is_on_device in (False, True):
        assert all(found["success"] for found in steps_with_faults(norm_is_on_device))


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
    return [*found, optimizer.step()[0]]


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


def _steps_of_one_model() -> list[list[Any]]:
    """Run backward before each case; the last one leaves the optimizer broken."""
    model = build_model()
    optimizer = build_optimizer(model)
    found = []
    for case in (
        _lose_gradient_after_they_were_listed,
        _lack_memory,
        _exceed_float32,
        _lose_parameter,
    ):
        optimizer.zero_grad()
        run_backward(model)
        found.append(case(model, optimizer))
    return found


@functools.cache
def steps_of_one_model() -> list[tuple[Any, ...]]:
    """Return what each rank found, by case."""
    return list(
        zip(*run_ranks(2, _steps_of_one_model, timeout_s=60.0).check().results, strict=True)
    )


def test_gradient_that_is_lost_after_they_were_listed_raises_on_all_ranks():
    """If nobody asks for the norm, gradients are checked once more before the step."""
    for text, is_same in steps_of_one_model()[0]:
        assert "rank 1: " in text and "expected a gradient on a shard of shape" in text
        assert is_same


def test_memory_that_one_rank_lacks_in_a_step_is_an_error_on_all():
    """Before anything is sent, where the others would wait for it; the next step may go on."""
    for text, is_same, success in steps_of_one_model()[1]:
        assert "rank 1: expected " in text
        assert "for messages, stacks and Newton-Schulz, got " in text
        assert "OutOfMemoryError: CUDA out of memory" in text
        assert is_same and success


def test_norm_beyond_float32_raises_and_changes_nothing():
    """Each gradient is finite, and so is its own norm; the square of the norm of all is not."""
    for text, is_same in steps_of_one_model()[2]:
        assert "gradient norm: expected a finite one, got inf" in text and is_same


def test_parameters_that_changed_on_one_rank_raise_on_all():
    """The exchange was planned for the parameters of construction."""
    for text, is_same in steps_of_one_model()[3]:
        assert "rank 1: param_groups: expected the 9 parameters of construction, got 8" in text
        assert "Nothing was updated" in text and is_same
