# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time what one GPU computes in the exchange of a large job, without the job's other GPUs.

    python3 benchmarks/device_time.py --jobs llama3-8b-64 qwen3-30b-64 --newton-schulz standard auto

The rank is the one that holds the most matrices. Its plan, rows, stacks and kernels are real;
messages do not travel: random numbers take their place, and the time of that is subtracted. A
figure is the median of several steps. The bound has the products of the standard steps at the rate
of an 8192 x 8192 x 8192 product, and 6 bytes an element to pack rows and 6 to write results at the
rate of a copy, both measured in the same run. A backend with fewer products can be below it.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from large_jobs import JOBS, Completed, Job, busiest_rank
from torch.profiler import ProfilerActivity, profile

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.settings import PlanSettings

STEPS = 5
PACKED_AND_WRITTEN = 12  # bytes an element: float32 to bf16, and back


class Roof(NamedTuple):
    """Rates that bound a step.

    Args:
        tflops: Of a large bf16 product.
        gbps: Of a copy, bytes read and written.
    """

    tflops: float
    gbps: float


def elapsed_ms(call: Callable[[], object]) -> float:
    """Return the device time of a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def median_ms(call: Callable[[], object]) -> float:
    """Return the device time of a call, the median of several after one that is not timed."""
    call()
    return statistics.median(elapsed_ms(call) for _ in range(STEPS))


def measured_roof(device: torch.device) -> Roof:
    """Measure a large product and a large copy."""
    side, numel = 8192, 2**29
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return Roof(
        2 * side**3 / median_ms(lambda: a @ b) / 1e9,
        8 * numel / median_ms(lambda: target.copy_(source)) / 1e6,
    )


class Messages:
    """Random numbers in place of what other ranks send.

    Args:
        device: Where messages are.
    """

    def __init__(self, device: torch.device) -> None:
        # As small as the elements of normalized matrices, so that products stay finite.
        self._numbers = torch.randn(2**24, device=device, dtype=torch.bfloat16).mul_(1e-4)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def receive(self, received: torch.Tensor, *_: Any, **__: Any) -> Completed:
        """Fill a message, as ``all_to_all_single`` would."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for piece in received.view(-1).split(self._numbers.numel()):
            piece.copy_(self._numbers[: piece.numel()])
        end.record()
        self._events.append((begin, end))
        return Completed()

    def take_ms(self) -> float:
        """Return the device time of all messages since the last call."""
        torch.cuda.synchronize()
        total = sum(begin.elapsed_time(end) for begin, end in self._events)
        self._events.clear()
        return total


def kernel_ms(step: Callable[[], object]) -> dict[str, float]:
    """Return the device time of a step by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiled.events():
        # Ranges of the host may be there too, with the time of the kernels below them.
        if not event.name.startswith("Muon."):
            found[event.name] += event.device_time_total / 1e3
    return dict(found)


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name."""
    name = kernel.lower()
    if name == "_move":
        return "rows"
    if any(part in name for part in ("gemm", "nvjet", "cutlass", "cublas", "splitk")):
        return "products"
    return "others"


def measure(job: Job, choice: str, roof: Roof, device: torch.device) -> dict[str, Any]:
    """Time the busiest rank of a job with a backend."""
    cost = CostModel(backend=choice)
    messages = Messages(device)
    sent = dist.all_to_all_single, dist.all_reduce
    with busiest_rank(job, device, PlanSettings(cost)) as (engine, rows):
        for tensor in rows.values():
            tensor.normal_()
        results = {handle: torch.empty_like(tensor) for handle, tensor in rows.items()}
        dist.all_to_all_single, dist.all_reduce = messages.receive, lambda *_, **__: Completed()
        try:
            step = lambda: list(engine.orthogonalize(rows, results))  # noqa: E731
            step()
            messages.take_ms()
            times = [elapsed_ms(step) - messages.take_ms() for _ in range(STEPS)]
            by_kernel = kernel_ms(step)
            messages_ms = messages.take_ms()
        finally:
            dist.all_to_all_single, dist.all_reduce = sent
        stacks = [task for runner in engine.runners for task in tasks(runner)]
    kinds: Counter[str] = Counter()
    for name, time_ms in by_kernel.items():
        kinds[kind_of(name)] += time_ms
    standard = CostModel()
    flops = sum(count * standard.work(*shape, parts).flops for count, shape, parts in stacks)
    numel = sum(tensor.numel() for tensor in rows.values())
    bound = flops / roof.tflops / 1e9 + PACKED_AND_WRITTEN * numel / roof.gbps / 1e6
    whole = statistics.median(times)
    return {
        "matrices": len(rows),
        "elements_M": numel / 1e6,
        "standard_flops": flops,
        "step_ms": whole,
        "products_ms": kinds["products"],
        "rows_ms": kinds["rows"],
        "others_ms": kinds["others"] - messages_ms,
        "bound_ms": bound,
        "over_bound": whole / bound,
        "kernels": dict(sorted(by_kernel.items(), key=lambda item: -item[1])[:30]),
    }


def tasks(runner: Any) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Yield, by stack of a runner, its matrices, the shape of a whole one, and its parts."""
    for bucket in runner.buckets:
        for task in bucket.tasks:
            group = task.args.parts_group
            parts = 1 if group is None else dist.get_world_size(group)
            yield task.tensor.shape[0], task.args.whole_shape, parts


COLUMNS = {
    "matrices": "d",
    "elements_M": ".0f",
    "step_ms": ".1f",
    "products_ms": ".1f",
    "rows_ms": ".1f",
    "others_ms": ".1f",
    "bound_ms": ".1f",
    "over_bound": ".2f",
}


def main() -> int:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["llama3-8b-64", "qwen3-30b-64"])
    parser.add_argument("--newton-schulz", nargs="+", choices=BACKENDS, default=[*BACKENDS])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    roof = measured_roof(device)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}: {roof.tflops:.0f} TFLOP/s, {roof.gbps:.0f} GB/s")
    print(f"| job | Newton-Schulz | {' | '.join(COLUMNS)} |")
    print(f"| --- | --- |{' ---: |' * len(COLUMNS)}")
    found = {}
    for job in options.jobs:
        for choice in options.newton_schulz:
            row = found[f"{job} {choice}"] = measure(JOBS[job], choice, roof, device)
            cells = " | ".join(format(row[column], digits) for column, digits in COLUMNS.items())
            print(f"| {job} | {choice} | {cells} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"roof": roof._asdict(), "jobs": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
