# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Main gradients of Megatron-FSDP against plain autograd on the unsharded model.

With fused accumulation a linear layer of Transformer Engine adds its weight gradient to the main
gradient itself. megatron-core 0.19 lets it overwrite instead, which loses all microbatches but the
last wherever the buffer persists: ZeRO-0 and ZeRO-1 (docs/upstream_defects.md).
"""

import math
from typing import Any

from gpu_checks.ranks import RanksError, run_ranks
from gpu_checks.report import Context, Device, Report
from gpu_checks.toy_model import Size, has_transformer_engine

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NUM_MICROBATCHES = 4
# Sums of a few hundred fp32 products in another order; one lost microbatch of four is off by 0.25.
_TOLERANCE = 1e-3


def check(context: Context, report: Report) -> None:
    """Compare each ZeRO stage, dense and with experts, and fused where that is possible."""
    world_size = 1 if context.device == "cuda" else 2
    models = {"dense": Size(), "8 experts": Size(num_experts=8)}
    if has_transformer_engine() and context.device == "cuda":
        models["fused, dense"] = Size(is_fused=True)
        models["fused, 8 experts"] = Size(is_fused=True, num_experts=8)
    else:
        report.leave_out("Transformer Engine with fused accumulation", _reason(context.device))
    rows = []
    worst = 0.0
    for name, size in models.items():
        try:
            found = run_ranks(
                context, world_size, _differences, context.device, size,
                timeout_s=context.limit_s / 2,
            )  # fmt: skip
        except RanksError as error:
            report.expect(False, f"{name}: {error}")
            continue
        for strategy in STRATEGIES:
            difference = max(of_rank[strategy][0] for of_rank in found)
            refusal = found[0][strategy][1]
            rows.append([name, strategy, f"{difference:.1e}", refusal or "no"])
            # What is wrong and refused with Muon harms nobody who uses this package.
            report.expect(
                difference <= _TOLERANCE or bool(refusal),
                f"{name}, {strategy}: gradients differ by {difference:.1e} of their norm",
            )
            worst = max(worst, 0.0 if refusal else difference)
    report.data("differences", rows)
    report.table(
        "Main gradients against the unsharded sum",
        ("model", "strategy", "largest relative difference of a parameter", "refused with Muon"),
        rows,
    )
    report.figure(f"{len(rows)} models on {world_size} ranks, largest difference {worst:.1e}")


def _reason(device: Device) -> str:
    if device == "cpu":
        return "it computes on GPUs only"
    return "expected transformer-engine to be installed, found none"


def _differences(device: Device, size: Size) -> dict[str, tuple[float, str]]:
    """Return by strategy the largest difference, and how Muon refuses it where it does."""
    import torch
    import torch.distributed as dist

    from gpu_checks import toy_model

    where = toy_model.start(device)
    torch.set_float32_matmul_precision("highest")
    world = range(dist.get_world_size())
    seeds = [[100 * rank + i for i in range(NUM_MICROBATCHES)] for rank in world]
    expected = _unsharded(size, [seed for of_rank in seeds for seed in of_rank], where)
    found = {}
    for strategy in STRATEGIES:
        gpt, config = toy_model.build_gpt(size, where)
        model = toy_model.wrap(gpt, config, strategy, where)
        refusal = ""
        try:
            toy_model.build_optimizer(model)
        except ValueError as error:
            refusal = " ".join(str(error).split())[:160]
        toy_model.run_backward(model, where, seeds=seeds[dist.get_rank()])
        model.finish_grad_sync()
        found[strategy] = (max(_relative(model, expected)), refusal)
    return found


def _unsharded(size: Size, seeds: list[int], device: Any) -> dict[str, Any]:
    """Return the mean gradient over the microbatches of all ranks, by name of the parameter."""
    from gpu_checks import toy_model

    # The same modules, of which none accumulates by itself.
    gpt, _ = toy_model.build_gpt(size, device)
    for module in gpt.modules():
        for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
            if hasattr(module, name):
                setattr(module, name, False)
    for seed in seeds:
        (toy_model.loss_of(gpt, seed, device) / len(seeds)).backward()
    return {name: param.grad for name, param in gpt.named_parameters()}


def _relative(model: Any, expected: dict[str, Any]) -> list[float]:
    """Return the difference of each matrix's gradient on this rank, relative to its norm."""
    from gpu_checks.reference import relative_difference
    from megatron_muon.mcore.fsdp_model import bare_name, describe_matrix

    found = [0.0]
    for full_name, param in model.param_and_grad_buffer.optimizer_named_parameters:
        name = bare_name(full_name)
        if param.dim() != 2:
            continue
        rows = expected[name][slice(*describe_matrix(name, param).local_range)]
        if param.grad is not None:
            found.append(relative_difference(param.grad._local_tensor, rows))
        elif rows.numel():
            found.append(math.inf)
    return found
