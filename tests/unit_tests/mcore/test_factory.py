# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which optimizer each parameter goes to, against upstream's choice under DDP."""

import json
import re
from typing import Any

import pytest
from helpers.later_releases import pretend_emerging_optimizers_0_5
from helpers.ranks import Run, launch, run_ranks
from helpers.split_reference import SKIP_ROUTER, under_ddp
from helpers.toy_fsdp import (
    build_gpt,
    build_model,
    build_optimizer,
    start_process_groups,
    wrap_gpt,
)
from helpers.toy_gpt import EP, MOE, fsdp_toy_gpt, slow, toy_gpt

pytestmark = pytest.mark.ranks
ONE_ITERATION = ("--train-iters", "1", "--lr-warmup-iters", "0")


def _print_routes() -> None:
    """Print optimizer, is_expert, wd_mult and max_lr of every parameter once they are built."""
    from emerging_optimizers.soap import SOAP
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from megatron.training import training

    from megatron_muon.mcore.sharded_matrices import FSDPWholeMatrixOptimizer

    original = training.get_megatron_optimizer

    def get_megatron_optimizer(config, model, **kwargs):
        optimizer = original(config, model, **kwargs)
        names = {param: name.replace("module.", "") for name, param in model[0].named_parameters()}
        found = {}
        for inner in (child.optimizer for child in optimizer.chained_optimizers):
            name = type(inner).__name__.removeprefix("FSDP")
            if isinstance(inner, SOAP | FSDPWholeMatrixOptimizer):
                name = "soap"
            kind = "muon" if isinstance(inner, TensorParallelMuon) else name
            for group in inner.param_groups:
                route = [kind, *(group[key] for key in ("is_expert_parallel", "wd_mult", "max_lr"))]
                found |= {names[param]: route for param in group["params"]}
        print("ROUTES", json.dumps(found), flush=True)
        return optimizer

    training.get_megatron_optimizer = get_megatron_optimizer


def routes(run: Run) -> list[dict[str, list[Any]]]:
    """Parse what ``_print_routes()`` printed on each rank."""
    return [json.loads(re.search("^ROUTES (.*)$", text, re.M)[1]) for text in run.outputs]


ADAM_MOE = (
    *(*EP, "--moe-layer-freq", "[0,1]", "--moe-shared-expert-intermediate-size", "16"),
    *("--moe-shared-expert-gate", "--decoupled-lr", "5e-3"),
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(ADAM_MOE, id="moe"),
        pytest.param((*EP, "--optimizer", "soap"), id="soap"),
        slow((*MOE, SKIP_ROUTER, "--qk-layernorm", "--apply-wd-to-qk-layernorm"), id="router"),
        slow(("--muon-scalar-optimizer", "lion", "--add-qkv-bias"), id="lion_bias"),
    ],
)
def test_parameters_go_to_the_same_optimizer_as_under_ddp(flags):
    """Each parameter has the optimizer, weight decay and rate that it has under DDP."""
    flags = (*flags, *ONE_ITERATION)
    run = launch(2, fsdp_toy_gpt("optim_grads_params", *flags), before=_print_routes).check()
    found, text = routes(run), run.outputs[0]
    upstreams, before = under_ddp(flags, _print_routes)
    expected = routes(launch(2, toy_gpt(*upstreams), before=before).check())
    assert found == expected
    name = "soap" if "soap" in flags else "muon"
    assert {name} < {route[0] for route in found[0].values()}
    routers = {route[0] for key, route in found[0].items() if ".router." in key}
    assert routers <= {"AdamW" if SKIP_ROUTER in flags else name}
    assert f"{name}, this rank's model-parallel part: " in text


def test_plan_is_logged_where_asked():
    """The logged plans have experts on their ranks, dense matrices on all, and loads of owners."""
    # Megatron-FSDP turns the last flag on itself: it does not mean the layer-wise optimizer here.
    flags = (*EP, *ONE_ITERATION, "--muon-fsdp-log-plan", "--use-distributed-optimizer")
    run = launch(4, fsdp_toy_gpt("optim_grads_params", *flags)).check()
    text = run.outputs[0]
    assert "Muon exchange of 2 ranks, 0 to 2:" in text
    assert "Muon exchange of 4 ranks, 0 to 3:" in text
    # Rank 1 is the first one of the other copy of the experts.
    assert "Muon exchange of 4 ranks" not in run.outputs[1]


def _parameter_that_asks_for_another_optimizer() -> list[str]:
    """Mark a weight as later releases mark that of Mamba, and name the optimizers of two."""
    import megatron_muon

    megatron_muon.enable()
    start_process_groups()
    gpt = build_gpt()
    gpt.decoder.layers[0].mlp.linear_fc1.weight.use_muon = False
    model = wrap_gpt(gpt, "optim_grads_params")
    optimizers = {
        param: type(child.optimizer).__name__
        for child in build_optimizer(model).chained_optimizers
        for param in child.get_parameters()
    }
    named = {name: optimizers.get(param) for name, param in model.named_parameters()}
    return [
        optimizer
        for layer in (0, 1)
        for name, optimizer in named.items()
        if name.endswith(f"layers.{layer}.mlp.linear_fc1.weight")
    ]


def test_parameter_may_ask_for_the_scalar_optimizer():
    """``use_muon = False`` of a parameter is copied to its shard, and obeyed."""
    (found,) = run_ranks(1, _parameter_that_asks_for_another_optimizer).check().results
    assert found == ["AdamW", "FSDPZeROTensorParallelMuon"]


def _build_with_four_steps_of_cubic5() -> str:
    pretend_emerging_optimizers_0_5()
    model = build_model("optim_grads_params")
    with pytest.raises(RuntimeError) as error:
        build_optimizer(model, muon_coefficient_type="cubic5", muon_num_ns_steps=4)
    return str(error.value)


def test_invalid_num_ns_steps_is_refused_at_construction():
    """A number of steps that emerging-optimizers refuses in a step is refused at construction."""
    for said in run_ranks(2, _build_with_four_steps_of_cubic5).check().results:
        assert "ranks 0, 1: --muon-num-ns-steps: expected 5 for cubic5" in said
        assert "No optimizer was built." in said
