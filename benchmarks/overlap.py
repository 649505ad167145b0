# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Profile an optimizer step, and tell how much of the time of messages runs under computation.

    torchrun --nproc-per-node 2 scripts/cpu_ranks benchmarks/overlap.py --hidden 256 --layers 4
    torchrun --nproc-per-node 8 -m megatron_muon benchmarks/overlap.py --hidden 4096 --layers 8

The optimizers and the model are those of ``optimizer_step.py``. ``torch.profiler`` records each
step by itself, and the events are read in memory:

========  ==========================================  ============================================
events    on GPUs                                     on gloo ranks
========  ==========================================  ============================================
message   kernels of NCCL                             ``gloo:`` ranges, from the queue of a thread
                                                      of gloo to the end of the message
product   kernels of matrix products                  ``aten::mm`` and its relatives
compute   all other kernels too, without copies and   all operations of torch, copies too
          fills of memory
========  ==========================================  ============================================

A message lasts from its start on this rank to its end, and so includes the wait for ranks that come
later: on a GPU a kernel of NCCL polls meanwhile, on gloo ranks a range of the host is open. Hidden
is the time in which a message and computation run at once, exposed the rest. On CPU ranks the
threads of gloo share the cores with the products, so that the share says whether messages are in
flight under products, not how much time that saves.

A figure of a rank is its median over steps. "Worst" is the rank with the most exposed time.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from device_time import kind_of
from measure import of_all_ranks, setup_of, start_ranks
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

OPTIMIZERS = "owner", "owner, fp32 messages"
CPU_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
# Copies and fills, and ranges of the host that are drawn over their kernels.
NO_KERNELS = "Memcpy", "Memset", "Muon.", "nccl:"

# Begin and end.
Span = tuple[float, float]


class Spans(NamedTuple):
    """Spans of the events of a step, in microseconds and in any order."""

    messages: Sequence[Span]
    products: Sequence[Span]
    compute: Sequence[Span]


def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans that overlap or touch; return them in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def length(spans: Iterable[Span]) -> float:
    """Return the time in which any of the spans runs."""
    return sum(end - begin for begin, end in union(spans))


def common(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Return the time in which spans of both kinds run."""
    first, second = list(first), list(second)
    return length(first) + length(second) - length([*first, *second])


def figures(spans: Spans) -> dict[str, float | None]:
    """Return the figures of a step, in milliseconds.

    The step lasts from the begin of its first event to the end of the last one. The share is None
    if there is no message.
    """
    every = [span for kind in spans for span in kind]
    step = max(end for _, end in every) - min(begin for begin, _ in every) if every else 0.0
    message = length(spans.messages)
    hidden = common(spans.messages, spans.compute)
    return {
        "step_ms": step / 1e3,
        "message_ms": message / 1e3,
        "hidden_ms": hidden / 1e3,
        "hidden_share": hidden / message if message else None,
        "exposed_ms": (message - hidden) / 1e3,
        "products_ms": length(spans.products) / 1e3,
    }


def spans_of(events: Iterable[Any], *, on_gpu: bool) -> Spans:
    """Sort events of ``torch.profiler`` by kind.

    Args:
        events: ``profile.events()``.
        on_gpu: Whether to read kernels, in place of what the host does.
    """
    spans = Spans([], [], [])
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        name = event.name
        if not on_gpu:
            kind = spans.messages if name.startswith("gloo:") else None
            is_compute, is_product = name.startswith("aten::"), name in CPU_PRODUCTS
        elif event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        else:
            # ncclDevKernel_SendRecv(...), before NCCL 2.19 ncclKernel_SendRecv_...
            kind = spans.messages if name.startswith("nccl") and "Kernel" in name else None
            is_compute = kind is None and not name.startswith(NO_KERNELS)
            is_product = is_compute and kind_of(name) == "products"
        if kind is not None:
            kind.append(span)
        if is_compute:
            spans.compute.append(span)
        if is_product:
            spans.products.append(span)
    return spans


def profiled_step(step: Any, *, on_gpu: bool) -> dict[str, float | None]:
    """Profile a step that all ranks start together."""
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=[activity]) as profiled:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    return figures(spans_of(profiled.events(), on_gpu=on_gpu))


def of_steps(steps: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the median of each figure; None where a step has none."""
    found: dict[str, float | None] = {}
    for key in steps[0]:
        values = [step[key] for step in steps]
        found[key] = None if None in values else median(v for v in values if v is not None)
    return found


def summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all ranks, of the worst one, and their means."""
    worst = max(ranks, key=lambda rank: rank["exposed_ms"])
    mean = {
        key: None if any(rank[key] is None for rank in ranks) else fmean(r[key] for r in ranks)
        for key in worst
    }
    return {"worst": dict(worst), "mean": mean, "ranks": [dict(rank) for rank in ranks]}


def lines(optimizer: str, found: Mapping[str, Any]) -> list[str]:
    """Return the lines of an optimizer in the table."""
    rows = []
    for which in ("worst", "mean"):
        values = found[which]
        share = "-" if values["hidden_share"] is None else f"{values['hidden_share']:.2f}"
        cells = [f"{values[f'{key}_ms']:.2f}" for key in ("step", "products", "message", "hidden")]
        cells += [share, f"{values['exposed_ms']:.2f}"]
        rows.append(f"| {optimizer} | {which} | {' | '.join(cells)} |")
    return rows


def main() -> int:
    """Profile, print a table on rank 0, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="profiled steps of each optimizer")
    parser.add_argument("--buckets", type=int, help="by default the planner's choice")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS[:1])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    device = start_ranks()
    from peers import Model, sharded_muon

    on_gpu = device.type == "cuda"
    model = Model.build(options.layers, options.hidden, device)
    optimizers = {}
    for name in options.optimizers:
        exchange: dict[str, Any] = {"comm_dtype": "fp32"} if "fp32" in name else {}
        peer = sharded_muon(model, "medium", **exchange, num_buckets=options.buckets)
        # The first step makes state, the first profile loads its libraries.
        peer.step()
        profiled_step(peer.step, on_gpu=on_gpu)
        steps = [profiled_step(peer.step, on_gpu=on_gpu) for _ in range(options.rounds)]
        optimizers[name] = summary(of_all_ranks(of_steps(steps)))
    if dist.get_rank() == 0:
        setup = setup_of(options, "hidden", "layers", "rounds", "buckets")
        setup["read from"] = "kernels of NCCL" if on_gpu else "ranges of gloo, on the host"
        print(", ".join(f"{key} {value}" for key, value in setup.items()))
        columns = "step ms", "products ms", "message ms", "hidden ms", "hidden share", "exposed ms"
        print(f"| optimizer | rank | {' | '.join(columns)} |\n|{' --- |' * 8}")
        for name, found in optimizers.items():
            print(*lines(name, found), sep="\n")
        if options.json is not None:
            data = {"setup": setup, "optimizers": optimizers}
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
