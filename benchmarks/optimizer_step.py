# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time an optimizer step against its peers, all in one run, on gloo CPU ranks or on GPUs.

    torchrun --nproc-per-node 4 scripts/cpu_ranks benchmarks/optimizer_step.py --hidden 512
    torchrun --nproc-per-node 8 -m megatron_muon benchmarks/optimizer_step.py --hidden 4096

Every peer has the same matrices, sharded as Megatron-FSDP shards them. The peers are timed in turn,
one step each, so that other work on the machine disturbs all peers equally. Times are of the
slowest rank, medians over the rounds. For peers that leave parameters sharded, ``+ params`` adds an
all-gather of fp32 parameters, which Megatron-FSDP does in the next forward pass.
"""

import argparse
import json
import math
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
    setup_of,
    slowest,
    start_ranks,
    step_seconds,
)
from peers import PEERS, Model, Peer


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
            "peak_extra_bytes": slowest(memory["bytes"]),
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
        # Within one step, so that noise of the machine meets both.
        shares = [a / b for a, b in zip(newton_schulz[name], seconds[name], strict=True)]
        results[name] |= {
            "step_ms": step * 1e3,
            "newton_schulz_ms": median(newton_schulz[name]) * 1e3,
            "efficiency": median(shares),
            "with_params_ms": (step + (0 if peer.has_whole_parameters else median(gathers))) * 1e3,
            "over_owner": step / median(seconds.get("owner", [math.nan])),
        }
    return results


def _lines(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| peer | step ms | / owner | + params ms | NS ms | efficiency | MB a rank | peak MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r['step_ms']:.1f} | {r['over_owner']:.2f} | {r['with_params_ms']:.1f} | "
            f"{r['newton_schulz_ms']:.1f} | {r['efficiency']:.2f} | "
            f"{r['bytes_a_rank'] / 1e6:.1f} | {r['peak_extra_bytes'] / 1e6:.1f} |"
        )
    return lines


def main() -> int:
    """Measure, print a table on rank 0, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each peer")
    parser.add_argument("--precision", choices=("medium", "high"), default="medium")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    model = Model.build(options.layers, options.hidden, start_ranks())
    peers = {name: PEERS[name](model, options.precision) for name in options.peers}
    results = _measure(peers, model, options.rounds)
    if dist.get_rank() == 0:
        setup = setup_of(options, "hidden", "layers", "precision", "rounds")
        setup |= {name: version(name) for name in ("megatron-core", "emerging-optimizers")}
        print(", ".join(f"{key} {value}" for key, value in setup.items()))
        print(*_lines(results), sep="\n")
        if options.json is not None:
            data = {"setup": setup, "peers": results}
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
