# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare Muon under Megatron-FSDP with upstream's Muon under DDP on this machine, by their losses.

    .venv/bin/python scripts/maintainer/check_parity.py --ranks 4 --noise-ranks 3

Every run goes through the launcher on the same number of ranks: on GPUs if there are any,
otherwise on CPU ranks over gloo. ``--noise-ranks`` adds upstream's DDP on another number of ranks,
which shows how far the reference differs from itself when sums are taken in another order.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt_flags import FP32_GRADIENTS, FSDP, MUON, SMALL_GPT
from launched_run import train

MODEL = (
    f"{SMALL_GPT} --num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --group-query-attention"
    " --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --global-batch-size 24"
    f" --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --optimizer muon {MUON}"
)
PRECISIONS = {
    # fp32 on the CPU. On a GPU it is TF32, which main() turns off.
    "high": "--muon-fp32-matmul-prec high",
    "medium": "--muon-fp32-matmul-prec medium",
    "bf16": "--bf16 --muon-fp32-matmul-prec medium",
}
# About twice what was seen on CPU ranks, see docs/numerics.md; with --noise-ranks, three times what
# the reference differs from itself, where that is more.
TOLERANCES = {"high": 5e-7, "medium": 1e-5, "bf16": 1.5e-4}
# Megatron logs six decimals of a loss.
LOGGED_DIGIT = 1e-6


def runs_under_fsdp(ranks: int) -> dict[str, str]:
    """Return the flags of each way to shard over this number of ranks, by name."""
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    runs = {
        f"ZeRO-{stage} {name}": f"{FSDP} --data-parallel-sharding-strategy {name}"
        for stage, name in enumerate(strategies)
    }
    if ranks % 2 == 0:
        hsdp = f"{runs['ZeRO-3 optim_grads_params']} --num-distributed-optimizer-instances 2"
        runs[f"HSDP 2x{ranks // 2}"] = hsdp
        runs[f"HFSDP 2x{ranks // 2}"] = f"{hsdp} --outer-dp-sharding-strategy optim"
    return runs


def losses(ranks: int, flags: str, iterations: int) -> list[float]:
    """Train through the launcher and return the loss of every iteration."""
    length = f"--train-iters {iterations} --eval-interval {iterations + 1}"
    log = train(ranks, f"{MODEL} {flags} {length}".split())
    return [log.losses[iteration] for iteration in range(1, iterations + 1)]


def main() -> int:
    """Run the reference and every way to shard; print a table; 1 where a tolerance is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--noise-ranks", type=int, nargs="*", default=[])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=list(PRECISIONS))
    options = parser.parse_args()
    # cuBLAS then computes in fp32: TF32 would amplify the order of sums to 2e-3 (docs/numerics.md).
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    is_within = True
    print("| precision | run | last loss | largest relative difference | tolerance |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for precision in options.precision:
        flags, tolerance = PRECISIONS[precision], TOLERANCES[precision]
        reference = losses(options.ranks, flags, options.iterations)
        print(f"| {precision} | DDP, {options.ranks} ranks | {reference[-1]:.6f} | | |", flush=True)
        runs = [(f"DDP, {n} ranks", n, "") for n in options.noise_ranks]
        runs += [(n, options.ranks, f) for n, f in runs_under_fsdp(options.ranks).items()]
        for name, ranks, more in runs:
            dtypes = FP32_GRADIENTS if more and precision == "bf16" else ""
            found = losses(ranks, f"{flags} {more} {dtypes}", options.iterations)
            worst = max(abs(a - b) / b for a, b in zip(found, reference, strict=True))
            if not more:
                tolerance = max(tolerance, 3 * worst)
            is_within &= worst <= tolerance + LOGGED_DIGIT / min(reference)
            limit = f"{tolerance:.1e}" if more else "noise"
            print(f"| {precision} | {name} | {found[-1]:.6f} | {worst:.1e} | {limit} |", flush=True)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
