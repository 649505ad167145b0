# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which optimizer each parameter goes to, against upstream's choice under DDP."""

import re

import pytest
from helpers.ranks import Run, launch, run_ranks
from helpers.toy_gpt import MOE, fsdp_toy_gpt, toy_gpt

pytestmark = pytest.mark.ranks

SKIP_ROUTER = "--moe-router-skip-muon"
ROUTE = re.compile(r"^ROUTE (\S+) (\S+) (\S+) (\S+) (\S+)$", re.M)


def _print_routes() -> None:
    """Print name, optimizer, is_expert, wd_mult and max_lr of every parameter once it is built."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from megatron.training import training

    original = training.get_megatron_optimizer

    def get_megatron_optimizer(config, model, **kwargs):
        optimizer = original(config, model, **kwargs)
        names = {id(param): name for name, param in model[0].named_parameters()}
        for child in optimizer.chained_optimizers:
            inner = child.optimizer
            name = type(inner).__name__.removeprefix("FSDP")
            kind = "muon" if isinstance(inner, TensorParallelMuon) else name
            for group in inner.param_groups:
                for param in group["params"]:
                    print(
                        "ROUTE",
                        names[id(param)].replace("module.", ""),
                        kind,
                        group["is_expert_parallel"],
                        group["wd_mult"],
                        group["max_lr"],
                        flush=True,
                    )
        return optimizer

    training.get_megatron_optimizer = get_megatron_optimizer


def routes(run: Run) -> list[dict[str, tuple[str, ...]]]:
    """Parse what :func:`_print_routes` printed on each rank."""
    return [{m[1]: m.groups()[1:] for m in ROUTE.finditer(text)} for text in run.outputs]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="untied"),
        pytest.param(
            ("--qk-layernorm", "--apply-wd-to-qk-layernorm"),
            id="qk_layernorm",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                *MOE,
                *("--expert-model-parallel-size", "2", "--moe-layer-freq", "[0,1]"),
                *("--moe-shared-expert-intermediate-size", "16"),
                *("--moe-shared-expert-gate", "--decoupled-lr", "5e-3"),
            ),
            id="moe",
        ),
        pytest.param(
            ("--muon-scalar-optimizer", "lion", "--add-qkv-bias"),
            id="lion_bias",
            marks=pytest.mark.slow,
        ),
        pytest.param((*MOE, SKIP_ROUTER), id="router", marks=pytest.mark.slow),
    ],
)
def test_parameters_go_to_the_same_optimizer_as_under_ddp(flags):
    """Name by name the same optimizer, expert flag, weight decay and rate, on every rank."""
    flags = (*flags, "--train-iters", "1", "--lr-warmup-iters", "0")
    run = launch(2, fsdp_toy_gpt("optim_grads_params", *flags), before=_print_routes).check()
    found, text = routes(run), run.outputs[0]
    expected = routes(launch(2, toy_gpt(*flags), before=_print_routes).check())
    assert found == expected
    assert {"muon"} < {route[0] for route in found[0].values()}
    routers = {route[0] for name, route in found[0].items() if ".router." in name}
    assert routers <= {"AdamW" if SKIP_ROUTER in flags else "muon"}
    log = next(line for line in text.splitlines() if "Muon under Megatron-FSDP" in line)
    assert "not 2-D, or not for Muon by its rules" in log


def test_plan_is_logged_where_asked():
    """Experts over their data-parallel ranks, dense matrices over all, with owners' loads."""
    flags = (*MOE, "--expert-model-parallel-size", "2", "--muon-fsdp-log-plan")
    flags += ("--train-iters", "1", "--lr-warmup-iters", "0")
    run = launch(4, fsdp_toy_gpt("optim_grads_params", *flags)).check()
    text = run.outputs[0]
    assert "Muon exchange plan of 2 ranks, 0 to 2:" in text
    assert "Muon exchange plan of 4 ranks, 0 to 3:" in text
    assert text.count("Newton-Schulz: busiest rank") == 2
    assert text.count("rank  matrices  Newton-Schulz ms  traffic ms") == 2
    assert "Muon exchange plan" not in run.outputs[1]


def _parameter_that_asks_for_another_optimizer() -> list[str]:
    """Mark a weight as later releases mark that of Mamba, and name the optimizers of two."""
    from helpers.toy_fsdp import build_gpt, build_optimizer, start_process_groups, wrap_gpt

    import megatron_muon

    megatron_muon.enable()
    start_process_groups()
    gpt = build_gpt()
    gpt.decoder.layers[0].mlp.linear_fc1.weight.use_muon = False
    model = wrap_gpt(gpt, "optim_grads_params")
    optimizer = build_optimizer(model)
    names = {id(param): name for name, param in model.named_parameters()}
    found = {
        names[id(param)]: type(child.optimizer).__name__
        for child in optimizer.chained_optimizers
        for group in child.optimizer.param_groups
        for param in group["params"]
    }
    return [
        optimizer
        for layer in (0, 1)
        for name, optimizer in found.items()
        if name.endswith(f"layers.{layer}.mlp.linear_fc1.weight")
    ]


def test_parameter_may_ask_for_the_scalar_optimizer():
    """``use_muon = False`` is copied to the sharded parameter, and obeyed."""
    (found,) = run_ranks(1, _parameter_that_asks_for_another_optimizer).check().results
    assert found == ["AdamW", "FSDPZeROTensorParallelMuon"]


def _build_with_four_steps_of_cubic5() -> str:
    from helpers.later_releases import pretend_emerging_optimizers_0_5
    from helpers.toy_fsdp import build_model, build_optimizer

    pretend_emerging_optimizers_0_5()
    model = build_model("optim_grads_params")
    try:
        build_optimizer(model, muon_coefficient_type="cubic5", muon_num_ns_steps=4)
    except RuntimeError as error:
        return str(error)
    return "built"


def test_invalid_num_ns_steps_is_refused_at_construction():
    """emerging-optimizers raised in the first step; with bf16 messages nobody did."""
    for said in run_ranks(2, _build_with_four_steps_of_cubic5).check().results:
        assert "ranks 0, 1: --muon-num-ns-steps: expected a number for cubic5" in said
        assert "No optimizer was built." in said
