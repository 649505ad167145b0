# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time whole training iterations of Megatron-LM with each optimizer, on the same ranks and model.

    .venv/bin/python benchmarks/training_step.py --ranks 2 --hidden 256 --layers 4

Everything runs in bf16: upstream's layer-wise optimizer fails in fp32 (megatron-core 0.19.2:
``'TensorParallelMuon' object has no attribute 'get_loss_scale'``). Every run goes through the
launcher: GPUs where there are any, gloo ranks else. The runs take turns, ``--passes`` times, and a
figure is the median over passes of a run's median iteration, so that what else the machine does
meets all of them.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from gpt_flags import FSDP, MUON, SMALL_GPT
from launched_run import TrainingLog, train

COMMON = (
    f"{SMALL_GPT} --seq-length 64 --max-position-embeddings 64 --lr 2e-3 --min-lr 1e-4"
    " --logging-level 20 --timing-log-level 1 --bf16 --timing-log-option max"
)
SHARDED = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"
RUNS = {
    "FSDP, adam": f"{SHARDED} --optimizer adam",
    "FSDP, muon, owner": f"{SHARDED} --optimizer muon {MUON}",
    "DDP, muon, layer-wise": (
        f"--optimizer muon {MUON} --use-distributed-optimizer --ckpt-format torch_dist"
    ),
}


def run(options: argparse.Namespace, flags: str) -> TrainingLog:
    """Train a model of the asked size with the flags of one run."""
    sizes = (
        f"--num-layers {options.layers} --hidden-size {options.hidden}"
        f" --ffn-hidden-size {3 * options.hidden} --global-batch-size {options.ranks}"
        f" --train-iters {options.iterations} --eval-interval 100000"
    )
    return train(options.ranks, f"{COMMON} {flags} {sizes}".split())


def main() -> int:
    """Run everything in turn, print a table and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    logs: dict[str, list[TrainingLog]] = {name: [] for name in options.runs}
    for _ in range(options.passes):
        for name in options.runs:
            logs[name].append(run(options, RUNS[name]))
    results = {
        name: {
            "iteration_ms": statistics.median(log.median_step_ms() for log in found),
            "optimizer_ms": statistics.median(log.median_optimizer_ms() for log in found),
            "inner_step_ms": statistics.median(log.median_inner_step_ms() for log in found),
            "last_loss": found[0].losses[options.iterations],
        }
        for name, found in logs.items()
    }
    reference = results[options.runs[0]]["iteration_ms"]
    print(
        f"| run | iteration ms | / {options.runs[0]} | optimizer ms | inner step ms | last loss |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, r in results.items():
        print(
            f"| {name} | {r['iteration_ms']:.1f} | {r['iteration_ms'] / reference:.2f} | "
            f"{r['optimizer_ms']:.1f} | {r['inner_step_ms']:.1f} | {r['last_loss']:.4f} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
