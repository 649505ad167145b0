# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Adam and Lion, which step what Muon does not, on the shards of a Megatron-FSDP model.

On a GPU Adam may be Transformer Engine's, and Lion's update is compiled; CPU ranks have neither.
"""

from typing import Any

from gpu_checks.ranks import RanksError, run_ranks
from gpu_checks.report import Context, Device, Report

_NUM_STEPS = 3
# Of the learning rate, and of the parameter: fp32 rounds to 6e-8 of it, in three operations.
_OF_LR, _OF_PARAM = 1e-3, 1e-6
# Of all elements: where Lion's average is nearly zero, rounding decides its sign.
_MAX_WRONG = 1e-3


def check(context: Context, report: Report) -> None:
    """Compare three steps of each with its formula in float64."""
    world_size = 1 if context.device == "cuda" else 2
    for name in ("adam", "lion"):
        try:
            found = run_ranks(
                context, world_size, _run, context.device, name, timeout_s=0.45 * context.limit_s
            )
        except RanksError as error:
            report.expect(False, f"{name}: {error}")
            continue
        count, wrong = (sum(each[key] for each in found) for key in ("count", "wrong"))
        report.data(name, found)
        report.figure(f"{name} ({found[0]['class']}): {wrong} of {count} elements off")
        report.expect(
            count > 0 and wrong <= _MAX_WRONG * count,
            f"{name}: {wrong} of {count} elements are not those of its formula",
        )


def _run(device: Device, name: str) -> dict[str, Any]:
    from gpu_checks import toy_model

    # It prepares megatron, which the next import brings.
    where = toy_model.start(device)
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    gpt, config = toy_model.build_gpt(toy_model.Size(), where)
    model = toy_model.wrap(gpt, config, "optim_grads_params", where)
    # Without clipping gradients are stepped as they are here.
    chain = toy_model.build_optimizer(model, muon_scalar_optimizer=name, clip_grad=0.0)
    (scalar,) = (
        child.optimizer
        for child in chain.chained_optimizers
        if not isinstance(child.optimizer, FSDPZeROTensorParallelMuon)
    )
    count = wrong = 0
    for step in range(1, _NUM_STEPS + 1):
        toy_model.run_backward(model, where, seeds=[step])
        model.finish_grad_sync()
        expected = [
            (param, group, _stepped(name, param, group, scalar.state[param], step))
            for group in scalar.param_groups
            for param in group["params"]
            if param.grad is not None and param._local_tensor.numel()
        ]
        chain.step()
        for param, group, value in expected:
            found = param._local_tensor.double()
            allowed = _OF_LR * group["lr"] + _OF_PARAM * value.abs()
            # Not >: NaN is not right either.
            wrong += int((~((found - value).abs() <= allowed)).sum())
            count += found.numel()
    return {"class": type(scalar).__name__, "count": count, "wrong": wrong}


def _stepped(name: str, param: Any, group: dict[str, Any], state: dict[str, Any], step: int) -> Any:
    """Return what the formula makes of this rank's shard, float64."""
    value, grad = param._local_tensor.double(), param.grad._local_tensor.double()
    average = state["exp_avg"]._local_tensor.double()
    beta1, beta2 = group["betas"]
    decayed = value * (1 - group["lr"] * group["weight_decay"])
    if name == "lion":
        return decayed - group["lr"] * (average + (1 - beta1) * (grad - average)).sign()
    square = state["exp_avg_sq"]._local_tensor.double()
    average = beta1 * average + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad * grad
    root = (square / (1 - beta2**step)).sqrt() + group["eps"]
    return decayed - group["lr"] * average / (1 - beta1**step) / root
