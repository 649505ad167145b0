# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time every backend of Newton-Schulz on every shape, in one run, as ratios to the standard steps.

    .venv/bin/python benchmarks/newton_schulz.py
    .venv/bin/python benchmarks/newton_schulz.py --memory
    python3 benchmarks/newton_schulz.py --device cuda --stacks 1 4 16

On a CPU matrices are fp32, on a GPU bf16. Backends take turns, round after round; a figure is the
median over rounds. The table has the ratio of floating-point operations too, which the cost
model assumes.

With --stacks only the standard steps are timed: TFLOP/s in stacks of as many matrices.

With --memory nothing is timed: printed is the most that is allocated at once, result included, in
multiples of the matrix. That of the Gram form is the same in fp16, where all of it halves.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.cost import CostModel

SHAPES = {
    "cpu": ((512, 512), (512, 1024), (512, 2048), (512, 3584), (1024, 4096)),
    # The largest first, where kernels matter most.
    "cuda": (
        *((8192, 57344), (8192, 8192), (7168, 18432), (4096, 28672), (4096, 14336), (4096, 4096)),
        *((2048, 14336), (2048, 8192), (2048, 2048), (1536, 2048), (1024, 4096), (1024, 1024)),
        *((768, 2048), (512, 2048), (128, 2048)),
    ),
}


def stack_of(
    shape: tuple[int, int], size: int, device: torch.device, is_bf16: bool
) -> tuple[torch.Tensor, NewtonSchulzArgs]:
    """Return a stack of normalized random matrices, and the arguments of a backend."""
    settings = NewtonSchulzSettings(5, "quintic", is_bf16, lambda rows, cols: (1.0, 1.0))
    # The norm of such a matrix is nearly the root of its elements.
    stack = torch.randn(size, *shape, device=device) / (shape[0] * shape[1]) ** 0.5
    args = NewtonSchulzArgs(settings, shape, is_normalized=is_bf16)
    return (stack.bfloat16() if is_bf16 else stack), args


def seconds_of(name: str, stack: torch.Tensor, args: NewtonSchulzArgs) -> float:
    """Time one call of a backend."""
    _wait(stack.device)
    start = time.perf_counter()
    BACKENDS[name].run(stack, args)
    _wait(stack.device)
    return time.perf_counter() - start


def measure(shape: tuple[int, int], rounds: int, device: torch.device) -> dict[str, Any]:
    """Return seconds and ratios of each backend for a matrix of a shape."""
    stack, args = stack_of(shape, 1, device, device.type == "cuda")
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    # The first round chooses kernels, and compiles them.
    for _ in range(rounds + 1):
        for name, times in seconds.items():
            times.append(seconds_of(name, stack, args))
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    flops = {name: CostModel(backend=name).work(*shape).flops for name in seconds}
    return {
        "shape": list(shape),
        "standard_ms": medians["standard"] * 1e3,
        "standard_tflops": flops["standard"] / medians["standard"] / 1e12,
        "over_standard": {name: medians[name] / medians["standard"] for name in seconds},
        "operations_over_standard": {name: flops[name] / flops["standard"] for name in seconds},
    }


def stacked_tflops(shape: tuple[int, int], size: int, rounds: int, device: torch.device) -> float:
    """Return the TFLOP/s of the standard steps in a stack of some size."""
    stack, args = stack_of(shape, size, device, device.type == "cuda")
    seconds = [seconds_of("standard", stack, args) for _ in range(rounds + 1)]
    flops = size * CostModel().work(*shape).flops
    return flops / statistics.median(seconds[1:]) / 1e12


def memory(shape: tuple[int, int]) -> dict[str, float]:
    """Return the peak of each backend on a CPU over the bytes of a normalized matrix."""
    stack, args = stack_of(shape, 1, torch.device("cpu"), is_bf16=True)
    found = {}
    for name in BACKENDS:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            BACKENDS[name].run(stack, args)
        events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
        current = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            current += event.nbytes()
            peak = max(peak, current)
        # The Gram form works in fp32 here, in 2 bytes on a GPU; the standard steps in bf16.
        found[name] = peak / (stack.numel() * (4 if "gram" in name else 2))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    others = [name for name in BACKENDS if name != "standard"]
    lines = [
        "| shape | standard, ms | TFLOP/s | "
        + " | ".join(f"{name} / standard: time | operations" for name in others)
        + " |",
        "| --- | " + " | ".join(["---:"] * (2 + 2 * len(others))) + " |",
    ]
    for row in rows:
        cells = [f"{row['standard_ms']:.2f}", f"{row['standard_tflops']:.3g}"]
        for name in others:
            cells.append(f"{row['over_standard'][name]:.2f}")
            cells.append(f"{row['operations_over_standard'][name]:.2f}")
        lines.append(f"| {row['shape'][0]} x {row['shape'][1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure every shape, print a table and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device",
        choices=SHAPES,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="a GPU if there is one",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stacks", nargs="+", type=int, metavar="N", help="matrices of a stack")
    parser.add_argument("--shapes", nargs="+", metavar="ROWSxCOLS", help="default: by device")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--memory", action="store_true", help="of each backend, on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    shapes = SHAPES[device.type]
    if options.shapes:
        shapes = tuple((int(n), int(m)) for n, m in (text.split("x") for text in options.shapes))
    if options.memory:
        for shape in shapes:
            peaks = ", ".join(f"{name} {peak:.1f}" for name, peak in memory(shape).items())
            print(f"{shape[0]} x {shape[1]}: {peaks}")
        return 0
    if options.stacks:
        for shape in shapes:
            rates = {n: stacked_tflops(shape, n, options.rounds, device) for n in options.stacks}
            cells = ", ".join(f"{size}: {rate:.3g}" for size, rate in rates.items())
            print(f"{shape[0]} x {shape[1]}, TFLOP/s in stacks of {cells}", flush=True)
        return 0
    rows = [measure(shape, options.rounds, device) for shape in shapes]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
