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
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.toy_fsdp import (
    build_model,
    build_optimizer,
    main_weights,
    model_weights,
    run_backward,
)
from torch.distributed.tensor import DTensor

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


def _contents(model: Any, optimizer: Any) -> list[Any]:
    """Copy this rank's part of main weights, model weights and the state of all optimizers."""
    states = [
        (value._local_tensor if isinstance(value, DTensor) else value).clone()
        for child in optimizer.chained_optimizers
        for state in child.optimizer.state.values()
        for value in state.values()
    ]
    return [*main_weights(model).values(), *model_weights(model), *states]


def _refused(step: Callable[[], Any], model: Any, optimizer: Any) -> str:
    """Return the error of a step, which changes nothing."""
    before = _contents(model, optimizer)
    with pytest.raises(RuntimeError) as error:
        step()
    assert all(map(torch.equal, before, _contents(model, optimizer)))
    return str(error.value)


def _step_with(fault: str, name: str, model: Any, optimizer: Any) -> str:
    """Step with a fault in a gradient of rank 1."""
    model.finish_grad_sync()
    for child in optimizer.chained_optimizers:
        for param in child.get_parameters():
            if dist.get_rank() == 1 and optimizer._fqns[param] == name:
                assert type(child.optimizer).__name__ == OWNERS[name]
                assert param.grad is not None
                param.requires_grad_(fault != "frozen")
                if fault in ("missing", "frozen"):
                    param.grad = None
                else:
                    param.grad._local_tensor[-1, -1] = float(fault)
    return _refused(optimizer.step, model, optimizer)


def _have_nan_above_threshold(model: Any, optimizer: Any) -> str:
    """Upstream skips such steps; one with a NaN would be skipped for ever, without an error."""
    with mock.patch.object(optimizer.config, "grad_norm_skip_threshold", 1e9):
        return _step_with("nan", next(iter(OWNERS)), model, optimizer)


def _have_no_fault(model: Any, optimizer: Any) -> str:
    """Whoever drops the faulty gradients may go on with the same optimizer."""
    assert optimizer.step()[0]
    return "no error"


def _keep_norm_on_device(case: Callable[..., str], model: Any, optimizer: Any) -> str:
    """Stand in for Transformer Engine's kernel, with which upstream reads no norm on the host."""
    from megatron.core.optimizer import clip_grads

    def scale(chunk_size: int, overflow: Any, tensors: Any, factor: Any) -> None:
        for source, target in zip(*tensors, strict=True):
            target.copy_(source * factor)

    with mock.patch.object(clip_grads, "multi_tensor_scale_tensor_impl", scale):
        return case(model, optimizer)


def _lack_memory(model: Any, optimizer: Any) -> str:
    """Before anything is sent, where the others would wait for it; the next step may go on."""
    from megatron_muon.runtime.arena import Arena

    model.finish_grad_sync()
    # As a GPU fails.
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(Arena, "allocate", side_effect=error))
        text = _refused(optimizer.step, model, optimizer)
    assert optimizer.step()[0]
    return text


def _exceed_float32(model: Any, optimizer: Any) -> str:
    """Each gradient is finite, and so is its own norm; the square of the norm of all is not."""
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
    return _refused(optimizer.step, model, optimizer)


def _lose_parameter(model: Any, optimizer: Any) -> str:
    """The exchange was planned for the parameters of construction."""
    model.finish_grad_sync()
    (muon,) = optimizer.muon_step.optimizers
    if dist.get_rank() == 1:
        muon.param_groups[0]["params"].pop()
    return _refused(optimizer.step, model, optimizer)


def _have_another_lr(model: Any, optimizer: Any) -> str:
    """Rows of rank 1 would take longer steps than others of their matrix, without an error."""
    model.finish_grad_sync()
    for group in optimizer.param_groups:
        group["lr"] *= 1 + dist.get_rank()
    error = _refused(optimizer.step, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] /= 1 + dist.get_rank()
    return error


# Steps and what they are refused with, in this order, on one model.
ON_HOST: dict[str, tuple[Callable[..., str], str]] = {
    **{
        f"{fault} {name}": (functools.partial(_step_with, fault, name), f"rank 1: {name}: {text}")
        for (fault, text), name in itertools.product(FAULTS.items(), OWNERS)
    },
    "nan above threshold": (
        _have_nan_above_threshold,
        f"rank 1: {next(iter(OWNERS))}: {FAULTS['nan']}",
    ),
    "another lr": (_have_another_lr, "param_groups: expected .* rank 1 has .*lr 0.02.*Nothing was"),
    "no fault": (_have_no_fault, "no error"),
}
CASES = {
    **ON_HOST,
    "no memory": (
        _lack_memory,
        r"rank 1: CUDA out of memory. Tried to allocate 8.00 GiB",
    ),
    "norm above float32": (_exceed_float32, "gradient norm: expected a finite one, got inf"),
    # The message still names the gradient, where its norm is launched before the host knows.
    **{
        f"{name}, norm on device": (functools.partial(_keep_norm_on_device, case), text)
        for name, (case, text) in ON_HOST.items()
    },
    # Leaves the optimizer broken.
    "parameter lost": (
        _lose_parameter,
        r"rank 1: param_groups: expected the 9 parameters .*Nothing was updated",
    ),
}


def _step_with_all_faults() -> dict[str, str]:
    """Run backward before each step of one model."""
    model = build_model()
    optimizer = build_optimizer(model)
    texts = {}
    for name, (case, _) in CASES.items():
        optimizer.zero_grad()
        run_backward(model)
        texts[name] = case(model, optimizer)
    return texts


@functools.cache
def results() -> list[dict[str, str]]:
    """Return the errors on each rank, by case."""
    return run_ranks(2, _step_with_all_faults, timeout_s=120.0).check().results


@pytest.mark.parametrize("name", CASES)
def test_fault_on_one_rank_raises_on_all_and_changes_nothing(name):
    """A missing, frozen or infinite gradient on one rank raises on all, and changes nothing."""
    for texts in results():
        assert re.search(CASES[name][1], texts[name], re.DOTALL)
