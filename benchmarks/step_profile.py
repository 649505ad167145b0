# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Draw the phases of a step of plain FSDP2 on all ranks, as torch.profiler shows them.

    .venv/bin/torchrun --nproc-per-node 2 benchmarks/step_profile.py --out docs/step_profile.svg

Matrices of ``--layers`` layers and one embedding, stepped by ``MuonAdamW``. Ranges are those of the
host. On gloo ranks a wait is a wait; on GPUs the host does not wait there.
"""

import argparse
import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_muon.fsdp2 import ExchangeSettings, MuonAdamW

# Distinguishable for color-blind readers.
COLORS = {
    "momentum": "#999999",
    "norms": "#cc79a7",
    "start_gather": "#e69f00",
    "elementwise": "#009e73",
    "wait_for_gather": "#f4dfb8",
    "orthogonalize": "#0072b2",
    "local_matrices": "#56b4e9",
    "start_scatter": "#d55e00",
    "finish_scatter": "#f2c6ad",
    "update": "#000000",
}
NUM_WARM_UPS = 3
WIDTH, LEFT, RIGHT, LANE, TOP = 900, 60, 890, 34, 50

# Phase, start and duration in microseconds.
Range = tuple[str, float, float]


def profiled(hidden: int, num_layers: int) -> list[Range]:
    """Return the ranges of one step of this rank, from a moment that all ranks share."""
    is_gpu = torch.cuda.is_available()
    mesh = init_device_mesh("cuda" if is_gpu else "cpu", (dist.get_world_size(),))
    layers = [nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(num_layers)]
    model = nn.Sequential(nn.Embedding(256, hidden), *layers).to(mesh.device_type)
    fully_shard(model, mesh=mesh)
    # Many CPUs have no instructions for bf16.
    precision = "medium" if is_gpu else "high"
    optimizer = MuonAdamW.from_model(
        model,
        lr=1e-3,
        exchange=ExchangeSettings(num_buckets=4),
        fp32_matmul_prec=precision,
    )
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(NUM_WARM_UPS):
        optimizer.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        dist.barrier()
        with torch.profiler.record_function("step"):
            optimizer.step()
    events = profile.events()
    assert events is not None
    (start,) = (event.time_range.start for event in events if event.name == "step")
    return [
        (event.name.removeprefix("Muon."), event.time_range.start - start, event.cpu_time_total)
        for event in events
        if event.name.startswith("Muon.")
    ]


def drawing(of_ranks: list[list[Range]], title: str) -> str:
    """Return the picture: a lane for each rank, a bar for each range."""
    end_us = max(start + length for ranges in of_ranks for _, start, length in ranges)
    scale = (RIGHT - LEFT) / end_us
    height = TOP + LANE * len(of_ranks) + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" fill="#333333">{title}</text>',
    ]
    for rank, ranges in enumerate(of_ranks):
        y = TOP + LANE * rank
        parts.append(f'<text x="8" y="{y + 18}" fill="#333333">rank {rank}</text>')
        # Longest first: what is inside of another range is drawn over it.
        for phase, start, length in sorted(ranges, key=lambda each: -each[2]):
            parts.append(
                f'<rect x="{LEFT + scale * start:.1f}" y="{y}" width="{scale * length:.2f}" '
                f'height="{LANE - 8}" fill="{COLORS[phase]}"/>'
            )
    y = TOP + LANE * len(of_ranks)
    end = f"{end_us / 1000:.1f} ms"
    parts.append(f'<text x="{RIGHT}" y="{y + 10}" text-anchor="end" fill="#333333">{end}</text>')
    for number, (phase, color) in enumerate(COLORS.items()):
        x, at = LEFT + 160 * (number % 5), y + 30 + 20 * (number // 5)
        parts.append(f'<rect x="{x}" y="{at - 11}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{at}" fill="#333333">{phase}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Profile a step, and draw it on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256, help="rows of a matrix; it has 3 x")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True, help="SVG file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=datetime.timedelta(minutes=5))
    ranges = profiled(options.hidden, options.layers)
    of_ranks: list[list[Range]] = [ranges] * dist.get_world_size()
    dist.all_gather_object(of_ranks, ranges)
    if dist.get_rank() == 0:
        title = (
            f"A step: {options.layers} matrices of {3 * options.hidden} x {options.hidden}, 4 "
            f"buckets, {dist.get_world_size()} {dist.get_backend()} ranks, torch "
            f"{torch.__version__.partition('+')[0]}, {time.strftime('%Y-%m-%d')}"
        )
        options.out.write_text(drawing(of_ranks, title))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
