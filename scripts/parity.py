# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare losses of Muon under Megatron-FSDP with those of upstream's Muon under DDP.

    .venv/bin/python scripts/parity.py --ranks 2 --iterations 20 --hidden 64 --layers 2

On GPUs over NCCL if there are enough, otherwise on gloo CPU ranks. Each case trains a GPT three
times through the launcher, on the same samples and as many ranks:

=====  =============================================================================================
ddp    upstream's optimizer on whole matrices
fsdp   this package, ZeRO-3
noise  DDP again, with half the samples in a microbatch: sums of gradients in another order
=====  =============================================================================================

Losses are the fp32 values of TensorBoard's events. Runs whose sums are rounded differently drift
apart, so the tolerance is measured: the largest relative difference between the two DDP runs up to
ten iterations later, times ``NOISE_FACTOR``, and at least a few units in the last place of a loss
(``FLOOR``). In docs/numerics.md a run of 2,000 iterations is at most 1.4 times as far from DDP as
DDP runs are from each other. A loss that is not finite, or that is the last and is not below the
first, fails.

=====  =============================================================================================
bf16   bf16 weights, fp32 gradients
zero3  fp32, "high" precision without TF32, and no clipping. On one or two ranks sums of gradients
       have no order. Losses are then equal to the bit, which CPU ranks must show (tolerance 0); a
       GPU may round a backward pass differently from one run to the next, so there equality is only
       reported.
hsdp   as bf16, two replicas of half the ranks: an even number of ranks, four or more
moe    as bf16, four experts, on an even number of ranks with expert parallelism 2
=====  =============================================================================================

The command ends with 1 if a case fails.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent / "tests" / "functional")]

from gpt_flags import FP32_GRADIENTS, FSDP, MUON, SMALL_GPT  # noqa: E402
from launched_run import train  # noqa: E402
from metrics import read_events  # noqa: E402

NOISE_FACTOR, AHEAD = 3.0, 10
# Four units in the last place of an fp32 loss of 4.
FLOOR = 5e-7
SEQ_LENGTH, MICRO_BATCH, MICROBATCHES = 64, 2, 2
ZERO3 = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"
BF16 = "--bf16"
CASES = {
    "bf16": BF16,
    "zero3": "--muon-fp32-matmul-prec high --clip-grad 0",
    "hsdp": BF16,
    "moe": f"{BF16} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall",
}
# The same bits in every run of a shape; products of "high" precision in fp32, not in TF32.
ON_GPUS = {
    "TORCHDYNAMO_DISABLE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
}


def uses_gpus(ranks: int) -> bool:
    """Return whether ranks compute on GPUs: each needs one, and none is a test on CPU ranks.

    Raises:
        SystemExit: There are GPUs, but too few.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < num_gpus < ranks:
        raise SystemExit(
            f"--ranks: expected at most {num_gpus}, the number of GPUs, got {ranks}. Lower it, or "
            "set CUDA_VISIBLE_DEVICES to nothing for CPU ranks."
        )
    return num_gpus > 0


def exact_losses(
    ranks: int,
    flags: str,
    folder: Path,
    *,
    script: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[int, float]:
    """Train through the launcher, and return losses by iteration, unrounded.

    Args:
        ranks: Processes.
        flags: Megatron's.
        folder: For TensorBoard's events and ``log.txt``; nothing else may train there.
        script: The script, by default ``pretrain_gpt.py``.
        environment: Variables beside those of this process.

    Raises:
        RuntimeError: The run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    on_gpus = uses_gpus(ranks)
    flags += f" --tensorboard-dir {folder} --tensorboard-log-interval 1"
    train(
        ranks,
        # Indices of mock data, which every run would build anew.
        f"{flags} --data-cache-path {folder.parent / 'data'}".split(),
        on_cpu=not on_gpus,
        environment={**(ON_GPUS if on_gpus else {}), **(environment or {})},
        log_file=folder / "log.txt",
        **({} if script is None else {"script": script}),
    )
    return read_events(folder, 0)["lm loss"]


def gpt_flags(ranks: int, iterations: int, hidden: int, layers: int) -> str:
    """Return the flags of a GPT with Muon under DDP."""
    return (
        f"{SMALL_GPT} --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}"
        f" --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {3 * hidden}"
        f" --global-batch-size {ranks * MICRO_BATCH * MICROBATCHES} --lr 2e-3 --min-lr 1e-4"
        f" --lr-decay-style cosine --train-iters {iterations} --eval-interval {iterations + 1}"
        f" --optimizer muon {MUON} --micro-batch-size {MICRO_BATCH}"
    )


def relative_differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Return the difference of each loss over the expected one; infinity for one that is NaN."""
    pairs = zip(found, expected, strict=True)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return [math.inf if math.isnan(difference) else difference for difference in differences]


def judge(
    losses: Mapping[str, Sequence[float]], noise: Sequence[float], *, is_exact: bool
) -> dict[str, Any]:
    """Compare the losses of a case.

    Args:
        losses: Of ``ddp`` and ``fsdp``, by iteration.
        noise: Of DDP with other sums.
        is_exact: Whether losses must be equal.

    Returns:
        The row of the case; ``tolerance`` holds the largest of all iterations.
    """
    ddp, fsdp = losses["ddp"], losses["fsdp"]
    relative = relative_differences(fsdp, ddp)
    of_noise = relative_differences(noise, ddp)
    bounds = [
        0.0 if is_exact else max(FLOOR, NOISE_FACTOR * max(of_noise[: i + 1 + AHEAD]))
        for i in range(len(ddp))
    ]
    holds = all(found <= bound for found, bound in zip(relative, bounds, strict=True))
    return {
        "largest_difference": max(abs(a - b) for a, b in zip(fsdp, ddp, strict=True)),
        "relative": max(relative),
        "noise": max(of_noise),
        "iterations": len(ddp),
        "equal": list(fsdp) == list(ddp),
        "tolerance": {"atol": 0.0, "rtol": max(bounds)},
        "holds": holds and all(map(math.isfinite, fsdp)) and fsdp[-1] < fsdp[0],
        "losses": {name: list(values) for name, values in losses.items()},
    }


def compare(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train the runs of a case; return its row, or why there is none."""
    ranks, flags, zero3 = options.ranks, CASES[name], ZERO3
    is_even = ranks % 2 == 0
    if name == "hsdp":
        if ranks < 4 or not is_even:
            return {"skipped": f"expected an even number of ranks, four or more, got {ranks}"}
        zero3 += " --num-distributed-optimizer-instances 2"
    if name == "moe" and is_even:
        flags += " --expert-model-parallel-size 2"
    if BF16 in flags:
        zero3 += f" {FP32_GRADIENTS}"
    flags = f"{gpt_flags(ranks, options.iterations, options.hidden, options.layers)} {flags}"
    runs = {"ddp": "", "fsdp": zero3, "noise": f"--micro-batch-size {MICRO_BATCH // 2}"}
    losses = {}
    for run, more in runs.items():
        print(f"{name}: {run}", file=sys.stderr, flush=True)
        found = exact_losses(ranks, f"{flags} {more}", folder / f"{name}_{run}")
        losses[run] = [found[i] for i in range(1, options.iterations + 1)]
    is_exact = name == "zero3" and ranks <= 2 and not uses_gpus(ranks)
    return judge(losses, losses.pop("noise"), is_exact=is_exact)


def line(name: str, row: Mapping[str, Any]) -> str:
    """Return the line of a case in the table."""
    for reason in ("skipped", "error"):
        if reason in row:
            return f"| {name} | {' | '.join('-' * 6)} | {reason}: {row[reason].splitlines()[-1]} |"
    ddp, fsdp = row["losses"]["ddp"], row["losses"]["fsdp"]
    verdict = "equal" if row["equal"] else "holds" if row["holds"] else "FAILS"
    return (
        f"| {name} | {row['iterations']} | {ddp[0]:.4f} | {ddp[-1]:.4f} | {fsdp[-1]:.4f} "
        f"| {row['relative']:.1e} | {row['tolerance']['rtol']:.1e} | {verdict} |"
    )


def main() -> int:
    """Compare all cases, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses here, case by case")
    options = parser.parse_args()
    on_gpus = uses_gpus(options.ranks)
    setup = {name: getattr(options, name) for name in ("ranks", "iterations", "hidden", "layers")}
    setup |= {name: version(name) for name in ("torch", "megatron-core", "emerging-optimizers")}
    setup["gpu"] = torch.cuda.get_device_name() if on_gpus else "none"
    print(", ".join(f"{key} {value}" for key, value in setup.items()))
    print(
        "| case | iterations | first loss | last, DDP | last, FSDP | relative difference |", end=""
    )
    print(" tolerance | |\n|" + " --- |" * 8, flush=True)
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            try:
                cases[name] = compare(name, options, Path(folder))
            except (RuntimeError, ValueError) as error:  # it is a row: others go on
                cases[name] = {"error": str(error)}
            print(line(name, cases[name]), flush=True)
            if options.json is not None:
                text = json.dumps({"setup": setup, "cases": cases}, indent=1)
                options.json.write_text(text + "\n")
    return int(any("error" in row or row.get("holds") is False for row in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
