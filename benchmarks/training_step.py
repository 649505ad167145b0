# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time training iterations of Megatron-LM, or saves, with each optimizer on the same model.

    .venv/bin/python benchmarks/training_step.py --ranks 2 --hidden 256 --layers 4
    .venv/bin/python benchmarks/training_step.py --saves --runs "FSDP, adam" "FSDP, muon, owner"

Everything runs in bf16: upstream's layer-wise optimizer fails in fp32 (megatron-core 0.19.2:
``'TensorParallelMuon' object has no attribute 'get_loss_scale'``). Every run goes through the
launcher: GPUs where there are any, gloo ranks else. The runs take turns, ``--passes`` times, and a
figure is the median over passes of a run's median iteration, so that what else the machine does
meets all of them. Times of saves and loads are Megatron's own timers, of the slowest rank; of a
run's saves the median of all but the first (``tests/functional/save_costs.py`` has asynchronous
saves).

All runs train the same GPT on the same tokens, and differ in more than the optimizer. Gradients are
reduced in fp32 by DDP and by FSDP2 with Muon, in bf16 by FSDP2 with Adam and by Megatron-FSDP, and
overlap with the backward pass under FSDP alone. Three functions of Megatron's models have columns:
processor time of rank 0 in an iteration (``timed_pretraining.py``). The last run has no patches of
this package, without which Muon does not train.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from gpt_flags import FSDP, MUON, SMALL_GPT
from launched_run import TrainingLog, settled_median, train
from parity import uses_gpus
from timed_pretraining import FUNCTIONS

from megatron_muon.mcore.checkpoint_folders import find_checkpoint
from megatron_muon.mcore.checkpoint_reading import read_checkpoint

COMMON = (
    f"{SMALL_GPT} --seq-length 64 --max-position-embeddings 64 --lr 2e-3 --min-lr 1e-4"
    " --logging-level 20 --timing-log-level 1 --bf16 --timing-log-option max"
)
SHARDED = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"
FSDP2 = "--use-torch-fsdp2 --ckpt-format torch_dcp"
WITHOUT_PATCHES = ", no patches"
RUNS = {
    "FSDP, adam": f"{SHARDED} --optimizer adam",
    "FSDP, muon, owner": f"{SHARDED} --optimizer muon {MUON}",
    "FSDP2, adam": f"{FSDP2} --optimizer adam",
    "FSDP2, muon, owner": f"{FSDP2} --optimizer muon {MUON}",
    "DDP, muon": f"--optimizer muon {MUON} --ckpt-format torch_dist",
    "DDP, muon, layer-wise": (
        f"--optimizer muon {MUON} --use-distributed-optimizer --ckpt-format torch_dist"
    ),
    f"FSDP, adam{WITHOUT_PATCHES}": f"{SHARDED} --optimizer adam",
}
SAVED = ["FSDP, adam", "FSDP, muon, owner", "DDP, muon, layer-wise"]
TIMED = Path(__file__).resolve().parent / "timed_pretraining.py"
# Iterations between saves, in which a thread can write.
NUM_SAVES, SAVE_INTERVAL = 4, 5


def run(options: argparse.Namespace, flags: str, iterations: int, **settings: Any) -> TrainingLog:
    """Train a model of the asked size with the flags of one run."""
    sizes = (
        f"--num-layers {options.layers} --hidden-size {options.hidden}"
        f" --ffn-hidden-size {3 * options.hidden} --global-batch-size {options.ranks}"
        f" --train-iters {iterations} --eval-interval 100000"
    )
    flags = f"{COMMON} {flags} {sizes}"
    return train(options.ranks, flags.split(), on_cpu=not uses_gpus(options.ranks), **settings)


def measure_steps(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Train; return milliseconds of an iteration and its parts, and the last loss."""
    environment = {"TIMED_WITHOUT_PATCHES": "1"} if name.endswith(WITHOUT_PATCHES) else {}
    with tempfile.NamedTemporaryFile("r") as file:
        settings = {"log_file": Path(file.name), "script": TIMED, "environment": environment}
        log = run(options, RUNS[name], options.iterations, **settings)
        lines = re.findall("host ms: (.*)", file.read())
    by_iteration = [dict(item.rsplit(" ", 1) for item in line.split(", ")) for line in lines]
    host_ms = {
        f"{function}_ms": settled_median(
            {i: float(of[function]) for i, of in enumerate(by_iteration, 1)}
        )
        for function in FUNCTIONS
    }
    return {
        "iteration_ms": settled_median(log.step_ms),
        "optimizer_ms": settled_median(log.optimizer_ms),
        **host_ms,
        "last_loss": log.losses[options.iterations],
    }


def measure_saves(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Save several times and load in a new folder; return milliseconds and bytes."""
    flags = RUNS[name]
    last = NUM_SAVES * SAVE_INTERVAL
    with tempfile.TemporaryDirectory() as folder:
        saves = f"{flags} --save {folder} --save-interval {SAVE_INTERVAL} --exit-interval {last}"
        saved = run(options, saves, last + 1)
        loaded = run(options, f"{flags} --load {folder}", last + 1)
        checkpoint = read_checkpoint(find_checkpoint(Path(folder)))
        files = [path for path in checkpoint.folder.iterdir() if path.is_file()]
        state = [t for k, t in checkpoint.tensors.items() if k.startswith("optimizer.state.")]
        return {
            # The first save allocates.
            "save_ms": statistics.median(list(saved.save_ms.values())[1:]),
            "load_ms": loaded.load_ms,
            "MB": sum(path.stat().st_size for path in files) / 1e6,
            "state_MB": sum(t.size.numel() * t.properties.dtype.itemsize for t in state) / 1e6,
        }


def main() -> int:
    """Run everything in turn, print a table and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--saves", action="store_true", help="time saves and loads instead")
    parser.add_argument("--runs", nargs="+", choices=RUNS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    measure = measure_saves if options.saves else measure_steps
    runs = options.runs or (SAVED if options.saves else list(RUNS))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(options.passes):
        for name in runs:
            found[name].append(measure(options, name))
            print(f"pass {number + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    results = {
        name: {key: statistics.median(result[key] for result in passes) for key in passes[0]}
        for name, passes in found.items()
    }
    if not options.saves:
        for name, passes in found.items():
            # To the first run of the same pass: the machine's speed changes between passes.
            firsts = [result["iteration_ms"] for result in found[runs[0]]]
            ratios = [of["iteration_ms"] / ms for of, ms in zip(passes, firsts, strict=True)]
            results[name]["iteration / first"] = statistics.median(ratios)
    names = list(next(iter(results.values())))
    print(f"| run | {' | '.join(name.replace('_', ' ') for name in names)} |")
    print(f"| --- |{' --- |' * len(names)}")
    for name, result in results.items():
        print(f"| {name} | {' | '.join(f'{value:.4g}' for value in result.values())} |")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
