# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Kernels and host time of a matrix in a step of Muon on matrices that this rank holds whole."""

import statistics
import time
from typing import Any

from gpu_checks.ranks import run_ranks
from gpu_checks.report import Context, Device, Report

_SIZES = ((64, (1536, 2048)), (16, (4096, 7168)))
_TINY = ((4, (16, 24)),)
_ROUNDS = 5


def check(context: Context, report: Report) -> None:
    """Step many smaller matrices, and few larger ones."""
    sizes = _TINY if context.is_rehearsal else _SIZES
    (found,) = run_ranks(
        context, 1, _measure, context.device, sizes, timeout_s=0.9 * context.limit_s
    )
    rows = []
    for name, each in found.items():
        count = each["matrices"]
        rows.append(
            [
                name,
                f"{each['host_s'] / count * 1e6:.0f}",
                f"{each['kernels'] / count:.1f}",
                f"{each['copies'] / count:.1f}",
                f"{each['step_s'] * 1e3:.2f}",
                f"{each['newton_schulz_tflop'] / each['step_s']:.0f}",
            ]
        )
        report.figure(
            f"{name}: {rows[-1][1]} us of the host and {rows[-1][2]} kernels a matrix, "
            f"{rows[-1][4]} ms a step"
        )
    report.data("sizes", found)
    report.table(
        "A step of matrices that are whole on one rank",
        ("matrices", "host us a matrix", "kernels a matrix", "copies and fills a matrix",
         "step ms", "Newton-Schulz TFLOP/s of the whole step"),
        rows,
    )  # fmt: skip


def _measure(device: Device, sizes: Any) -> dict[str, dict[str, float]]:
    import torch

    from gpu_checks import ranks
    from megatron_muon.plan.cost import CostModel

    ranks.prepare_megatron(device)
    where = ranks.start(device)
    found = {}
    for count, shape in sizes:
        optimizer = _optimizer(count, shape, where)
        for _ in range(2):
            optimizer.step()
        host, total = [], []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step()
            host.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            total.append(time.perf_counter() - start)
        kernels, copies = _kernels(optimizer)
        found[f"{count} of {shape[0]} x {shape[1]}"] = {
            "matrices": count,
            "host_s": statistics.median(host),
            "step_s": statistics.median(total),
            "kernels": kernels,
            "copies": copies,
            "newton_schulz_tflop": count * CostModel().work(*shape).flops / 1e12,
        }
        del optimizer
        torch.cuda.empty_cache()
    return found


def _optimizer(count: int, shape: tuple[int, int], device: Any) -> Any:
    """Build Muon over matrices of one shape, with gradients."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
    from megatron_muon.mcore.muon_step import MuonStep
    from megatron_muon.plan.layout import RowLayout
    from megatron_muon.runtime.sharded_matrix import ShardedMatrix

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def drawn() -> DTensor:
        """Draw a matrix, whole on this rank."""
        local = torch.randn(shape, device=device)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    params = [torch.nn.Parameter(drawn()) for _ in range(count)]
    layout = RowLayout(*shape, ((0, shape[0]),))
    matrices = {
        param: ShardedMatrix(f"layer.{index}.weight", layout, mesh.get_group())
        for index, param in enumerate(params)
    }
    for param in params:
        param.grad = drawn()
    muon = FSDPZeROTensorParallelMuon(
        params, matrices=matrices, lr=0.01, weight_decay=0.1, nesterov=True
    )
    return MuonStep([muon])


def _kernels(optimizer: Any) -> tuple[int, int]:
    """Count what one step launches: kernels, and copies and fills of memory."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        optimizer.step()
        torch.cuda.synchronize()
    # The profiler shows names of ranges, such as the optimizer's, beside what runs in them.
    on_device = [
        event
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Optimizer.", "ProfilerStep", "nccl:"))
    ]
    copies = sum(event.name.startswith(("Memcpy", "Memset")) for event in on_device)
    return len(on_device) - copies, copies
