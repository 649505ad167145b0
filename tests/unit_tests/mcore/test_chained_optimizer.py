# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The step of FSDPMuonChainedOptimizer over a real Megatron-FSDP model."""

import copy
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


def _step_alone() -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    model = build_model()
    optimizer = build_optimizer(model)
    names = dict(model.param_and_grad_buffer.optimizer_named_parameters)
    states = [
        {
            key: isinstance(value, DTensor)
            and value._local_tensor.shape == param._local_tensor.shape
            for key, value in child.optimizer.state[param].items()
            if key != "step"
        }
        for child in optimizer.chained_optimizers
        for param in child.get_parameters()
    ]
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
    return {
        "num_params": len(names),
        "num_states": len(states),
        "keys": sorted({key for state in states for key in state}),
        "are_sharded": all(all(state.values()) for state in states),
        "losses": losses,
        "loss_scale": float(optimizer.get_loss_scale()),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_step_trains_without_a_training_loop(world_size):
    """A bare loop of backward and step() trains; every parameter has state from the start."""
    run = run_ranks(world_size, _step_alone).check()
    for result in run.results:
        assert result["num_params"] == result["num_states"]
        assert result["keys"] == ["exp_avg", "exp_avg_sq", "momentum_buffer"]
        assert result["are_sharded"]
        assert result["losses"][0] == pytest.approx(math.log(48), rel=0.1)
        assert result["losses"][-1] < result["losses"][0] - 0.05
        assert result["loss_scale"] == 1.0


def _skip_a_step() -> dict[str, bool]:
    model = build_model()
    optimizer = build_optimizer(model, grad_norm_skip_threshold=1e-9)
    run_backward(model)
    before, installed = main_weights(model), model_weights(model)
    success, grad_norm, _ = optimizer.step()
    import torch

    return {
        "success": success,
        "is_norm_above_threshold": grad_norm > 1e-9,
        "are_main_weights_same": all(are_equal(before, main_weights(model))),
        "are_model_weights_same": all(map(torch.equal, installed, model_weights(model))),
        "is_next_loss_finite": math.isfinite(run_backward(model)),
    }


def _fail_in_the_second_optimizer() -> dict[str, Any]:
    import torch

    from megatron_muon.runtime.agreement import INTERRUPTED

    model = build_model()
    optimizer = build_optimizer(model)
    run_backward(model)
    installed = model_weights(model)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("inner step")

    inner = optimizer.chained_optimizers[-1].optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    step, inner.step = inner.step, fail
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    is_same = all(map(torch.equal, installed, model_weights(model)))
    inner.step = step
    run_backward(model)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    optimizer.load_state_dict(saved)
    return {
        "num_optimizers": len(optimizer.chained_optimizers),
        "are_model_weights_same": is_same,
        "is_next_step_refused": INTERRUPTED in str(error.value),
        "success_after_load": optimizer.step()[0],
    }


def _count_installs() -> dict[str, int]:
    model = build_model()
    optimizer = build_optimizer(model)
    calls = {"install": 0, "gather": 0, "reduce": 0}
    fsdp = model.module

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    fsdp.install_optimized_model_weights = counted("install", fsdp.install_optimized_model_weights)
    model.start_param_sync = counted("gather", model.start_param_sync)
    model.finish_grad_sync = counted("reduce", model.finish_grad_sync)
    run_backward(model)
    optimizer.step()
    run_backward(model)
    model.finish_grad_sync()
    optimizer.step()
    return calls


def _reload(sharding: str) -> dict[str, bool]:
    import torch

    model = build_model(sharding)
    optimizer = build_optimizer(model)
    run_backward(model)
    optimizer.step()
    for group in model.param_and_grad_buffer.parameter_groups:
        group.model_weight_buffer.data.fill_(0.25)
    optimizer.reload_model_params()
    reloaded = all(bool((weight == 0.25).all()) for weight in main_weights(model).values())
    with pytest.raises(ValueError, match="expected no state_dict"):
        optimizer.reload_model_params(state_dict={"model": {}})
    with pytest.raises(ValueError, match="expected fsdp_dtensor, got dp_reshardable"):
        optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
    return {
        "main_weights": reloaded,
        "lr": isinstance(optimizer.param_groups[0]["lr"], float),
        "loss_scale": torch.is_tensor(optimizer.get_loss_scale()),
    }


RELOADED = dict.fromkeys(("main_weights", "lr", "loss_scale"), True)


MICROBATCHES = [
    ([False, True], "no error"),
    ([False, False], "reduced once over the outer ranks, got [0] times"),
    ([True], "no error"),
    ([True, True], "reduced once over the outer ranks, got [2] times"),
]


def _reduce_over_outer_ranks() -> list[str]:
    model = build_model("optim", num_distributed_optimizer_instances=2)
    optimizer = build_optimizer(model)
    return [_step_after(are_last, model, optimizer) for are_last, _ in MICROBATCHES]


def _step_after(are_last: list[bool], model: Any, optimizer: Any) -> str:
    optimizer.zero_grad()
    if len(are_last) == 1:
        # The rerun state machine runs forward and backward again after zeroing the gradients.
        run_backward(model)
        optimizer.zero_grad()
    for is_last in are_last:
        run_backward(model, is_last=is_last)
    before = main_weights(model)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert all(are_equal(before, main_weights(model)))
        return str(error)
    return "no error"


def test_hsdp_reduces_over_outer_ranks_once_or_raises():
    """Upstream reduces over the outer ranks in each microbatch marked as the last, and no other.

    One optimizer sees all cases: a refused step, once its gradients are dropped, harms no other.
    """
    for texts in run_ranks(4, _reduce_over_outer_ranks).check().results:
        for (_, message), text in zip(MICROBATCHES, texts, strict=True):
            assert message in text


def _wrap_before_enable(settings: dict[str, Any]) -> str:
    import megatron_muon

    enable, megatron_muon.enable = megatron_muon.enable, lambda: None
    model = build_model(**settings)
    megatron_muon.enable = enable
    try:
        build_optimizer(model)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}),
    ],
    ids=["one rank", "hfsdp"],
)
def test_model_that_was_wrapped_before_enable_is_refused(world_size, settings):
    """The repairs of gradients came too late for it: they were scaled wrongly without a word."""
    run = run_ranks(world_size, _wrap_before_enable, settings).check()
    assert all("got one that was wrapped before" in text for text in run.results)


def _build_with_tunable_kernels() -> str:
    """Let torch time kernels on rank 1 alone."""
    import os

    import torch.distributed as dist

    model = build_model()
    environment = {"PYTORCH_TUNABLEOP_ENABLED": str(dist.get_rank())}
    with mock.patch.dict(os.environ, environment), pytest.raises(RuntimeError) as error:
        build_optimizer(model)
    return str(error.value)


def _cases_of_two_ranks() -> dict[str, Any]:
    """Run each case over process groups of its own, with a model of its own."""
    from megatron.core import parallel_state

    found = {}
    for name, case in {
        # Nothing needs a repair on two ranks without HSDP.
        "wrapped before": functools.partial(_wrap_before_enable, {}),
        "skipped": _skip_a_step,
        "installs": _count_installs,
        "reload optim": functools.partial(_reload, "optim"),
        "reload optim_grads_params": functools.partial(_reload, "optim_grads_params"),
        "tunable kernels": _build_with_tunable_kernels,
        "failed": _fail_in_the_second_optimizer,
    }.items():
        found[name] = case()
        parallel_state.destroy_model_parallel()
    return found


@functools.cache
def cases_of_two_ranks() -> list[dict[str, Any]]:
    """Run all cases in one world."""
    return run_ranks(2, _cases_of_two_ranks, timeout_s=60.0).check().results


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("wrapped before", "no error"),
        # Above --grad-norm-skip-threshold nothing moves, and the next forward pass still runs.
        (
            "skipped",
            {
                "success": False,
                "is_norm_above_threshold": True,
                "are_main_weights_same": True,
                "are_model_weights_same": True,
                "is_next_loss_finite": True,
            },
        ),
        # Children would install and gather once each; a second reduction would be wrong.
        ("installs", {"install": 2, "gather": 2, "reduce": 2}),
        # After a model-only load the main weights follow the model, on every shard.
        ("reload optim", RELOADED),
        ("reload optim_grads_params", RELOADED),
        # A step that was tried again went on from momentum that had changed, without a word.
        (
            "failed",
            {
                "num_optimizers": 2,
                "are_model_weights_same": True,
                "is_next_step_refused": True,
                "success_after_load": True,
            },
        ),
    ],
)
def test_case_of_two_ranks(case, expected):
    """Steps that are skipped or fail, weights that are installed, and loaded."""
    assert [found[case] for found in cases_of_two_ranks()] == [expected] * 2


def test_tunable_kernels_are_refused_on_all_ranks():
    """Replicated matrices are orthogonalized on each rank, and would come to differ."""
    for found in cases_of_two_ranks():
        assert "rank 1: PYTORCH_TUNABLEOP_ENABLED: expected 0" in found["tunable kernels"]
        assert "No optimizer was built." in found["tunable kernels"]


REFUSED_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "soap": ({"optimizer": "soap"}, "got soap: it has no implementation over row shards"),
    "dist_muon": ({"optimizer": "dist_muon"}, "got dist_muon: it has no implementation"),
    "layer-wise": (
        {"use_layer_wise_distributed_optimizer": True},
        "Megatron-FSDP has already sharded",
    ),
    "CPU offload": (
        {"optimizer_cpu_offload": True},
        "Megatron then steps copies of the parameters on the CPU",
    ),
    "CUDA graph": ({"optimizer_cuda_graph": True}, "the step checks gradients on the host"),
}
# The type decides rather than attribute names; version 2 has no wrapper of Megatron; after a
# forward pass the module holds raw parameters, and a step of those would train nothing.
REFUSED_MODELS = {
    "type": "FullyShardedDataParallel, got LooksLikeFSDP",
    "version 2": "FullyShardedDataParallel, got Sequential",
    "late": "Build the optimizer before the first forward pass",
}


def _refuse() -> dict[str, str]:
    """Ask for what is refused: settings, other wrappers, and an optimizer that comes too late."""
    import torch

    from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer

    class LooksLikeFSDP(torch.nn.Linear):
        def finish_grad_sync(self) -> None: ...

        def install_optimized_model_weights(self) -> None: ...

    def error_of(build: Callable[[], Any]) -> str:
        try:
            build()
        except (TypeError, ValueError) as error:
            return str(error)
        return "no error"

    model = build_model()
    found = {
        name: error_of(functools.partial(build_optimizer, model, **settings))
        for name, (settings, _) in REFUSED_SETTINGS.items()
    }
    model_of_another_type = [LooksLikeFSDP(2, 2)]
    found["type"] = error_of(lambda: FSDPMuonChainedOptimizer([], model_of_another_type, {}))
    sharded = torch.nn.Linear(2, 2)
    sharded.weight._mfsdp_parameter_group = None
    found["version 2"] = error_of(lambda: build_optimizer(torch.nn.Sequential(sharded)))
    run_backward(model)
    found["late"] = error_of(lambda: build_optimizer(model))
    return found


@functools.cache
def refusals() -> dict[str, str]:
    """Run all refusals in one world."""
    return run_ranks(1, _refuse).check().results[0]


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_factory_refuses_unsupported_configurations(name):
    """A script on megatron-core alone meets the same refusals as a command line."""
    assert REFUSED_SETTINGS[name][1] in refusals()[name]


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_model_that_cannot_be_stepped_is_refused(name):
    """Models of another type, of version 2, or after a forward pass."""
    assert REFUSED_MODELS[name] in refusals()[name]
