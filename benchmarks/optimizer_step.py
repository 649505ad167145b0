# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time an optimizer step against its peers, all in one run, on gloo CPU ranks or on GPUs.

    torchrun --nproc-per-node 4 scripts/cpu_ranks benchmarks/optimizer_step.py --hidden 512

Every peer has the same matrices, sharded as Megatron-FSDP shards them. The peers are timed in turn,
one step each, so that other work on the machine disturbs all peers equally. Times are of the
slowest rank, medians over the rounds. For peers that leave parameters sharded, ``+ params`` adds an
all-gather of fp32 parameters, which Megatron-FSDP does in the next forward pass.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import (
    CollectiveCounter,
    FunctionTimer,
    peak_memory,
    slowest,
    step_seconds,
)
from peers import PEERS, Model, Peer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what the launcher has to choose")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each peer")
    parser.add_argument("--precision", choices=("medium", "high"), default="medium")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser


def _start_ranks(requested: str | None) -> torch.device:
    torch.set_num_threads(1)
    # On CPU ranks torch.cuda acts on the CPU.
    found = torch.device("cuda").type
    if requested not in (None, found):
        raise SystemExit(
            f"--device: expected {requested}, got {found}. Start it by scripts/cpu_ranks for cpu, "
            "by -m megatron_muon for cuda."
        )
    timeout = datetime.timedelta(minutes=5)
    if found == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", timeout=timeout)
    return torch.device("cuda", torch.cuda.current_device())


def _gather_parameters(model: Model) -> Any:
    """Make the all-gather of fp32 shards that Megatron-FSDP does in the forward pass."""
    sizes = [0] * dist.get_world_size()
    for rows, (_, num_cols) in zip(model.rows_of_ranks, model.shapes, strict=True):
        for rank, (start, stop) in rows.items():
            sizes[rank] += (stop - start) * num_cols
    size = max(sizes)
    shard = torch.zeros(size, device=model.device)
    whole = torch.zeros(size * dist.get_world_size(), device=model.device)
    return lambda: dist.all_gather_into_tensor(whole, shard)


def _measure(peers: dict[str, Peer], model: Model, num_rounds: int) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for name, peer in peers.items():
        with peak_memory() as memory, CollectiveCounter() as counter:
            peer.step()
        results[name] = {
            "bytes_a_rank": slowest(counter.num_bytes.total()),
            "collective_calls": counter.calls.total(),
            "peak_extra_bytes": slowest(memory["bytes"]),
            "note": peer.note,
        }
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    newton_schulz: dict[str, list[float]] = {name: [] for name in peers}
    gathers: list[float] = []
    gather = _gather_parameters(model)
    gather()
    timers = {name: FunctionTimer(peer.newton_schulz) for name, peer in peers.items()}
    for _ in range(num_rounds):
        gathers.append(step_seconds(gather))
        for name, peer in peers.items():
            with timers[name].running():
                seconds[name].append(step_seconds(peer.step))
            newton_schulz[name].append(slowest(timers[name].take_seconds()))
    for name, peer in peers.items():
        step = median(seconds[name])
        results[name] |= {
            "step_ms": step * 1e3,
            "fastest_step_ms": min(seconds[name]) * 1e3,
            "slowest_step_ms": max(seconds[name]) * 1e3,
            "newton_schulz_ms": median(newton_schulz[name]) * 1e3,
            # Within one step, so that noise of the machine meets both.
            "efficiency": median(
                [a / b for a, b in zip(newton_schulz[name], seconds[name], strict=True)]
            ),
            "with_params_ms": (step + (0 if peer.has_whole_parameters else median(gathers))) * 1e3,
        }
    for result in results.values():
        if "adam" in results:
            result["over_adam"] = result["step_ms"] / results["adam"]["step_ms"]
        if "owner" in results:
            result["over_owner"] = result["step_ms"] / results["owner"]["step_ms"]
    return results


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _lines(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| peer | step ms | / adam | / owner | + params ms | NS ms | efficiency | MB a rank | "
        "peak MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['step_ms']:.1f} | {_ratio(r.get('over_adam'))} | "
            f"{_ratio(r.get('over_owner'))} | {r['with_params_ms']:.1f} | "
            f"{r['newton_schulz_ms']:.1f} | {r['efficiency']:.2f} | "
            f"{r['bytes_a_rank'] / 1e6:.1f} | {r['peak_extra_bytes'] / 1e6:.1f} |"
        )
    return lines + [f"{name}: {r['note']}" for name, r in results.items() if r["note"]]


def main() -> int:
    """Measure, print a table on rank 0, and write JSON where asked."""
    options = _parser().parse_args()
    device = _start_ranks(options.device)
    model = Model.build(options.layers, options.hidden, device)
    peers, skipped = {}, {}
    for name in options.peers:
        try:
            peers[name] = PEERS[name](model, options.precision)
        except ImportError as error:
            skipped[name] = f"not measured: {error}"
    results = _measure(peers, model, options.rounds)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    setup = {
        "ranks": dist.get_world_size(),
        "hidden": options.hidden,
        "layers": options.layers,
        "elements": sum(rows * cols for rows, cols in model.shapes),
        "precision": options.precision,
        "rounds": options.rounds,
        "gpu": gpu,
        "cpus": len(os.sched_getaffinity(0)),
        "threads_a_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core").partition("+")[0],
        "emerging-optimizers": version("emerging-optimizers"),
    }
    if dist.get_rank() == 0:
        print(", ".join(f"{key} {value}" for key, value in setup.items()))
        print("\n".join([*_lines(results), *(f"{n}: {why}" for n, why in skipped.items())]))
        if options.json is not None:
            data = {"setup": setup, "peers": results, "skipped": skipped}
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
