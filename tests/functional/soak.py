# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train for thousands of iterations with restarts on other ranks, beside DDP; print tables.

    .venv/bin/python tests/functional/soak.py --iterations 2000 --output soak.json

A small GPT learns the bytes of Python's standard library with Muon under Megatron-FSDP, in bf16
and ZeRO-3 on CPU ranks: with evaluations, asynchronous saves, a batch size that grows, a skipped
iteration, and restarts on other numbers of ranks. The same samples train it under DDP with
upstream's Muon, without a restart, on one, two and three ranks, whose losses differ from each other
by rounding alone: by the noise of this training. The command ends with 1 if losses differ from
DDP's by more than ``MOST_NOISE`` times as much, or if ranks hold ever more threads, process groups,
open files, objects or memory.
"""

import argparse
import functools
import gc
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / name) for name in ("scripts", "tests/unit_tests", "")]

import byte_dataset  # noqa: E402
from gpt_flags import DECODER, FP32_GRADIENTS, FSDP, MUON, PLAIN_TORCH, REGULARIZATION  # noqa: E402
from helpers.checkpoint_runs import wrap  # noqa: E402
from helpers.ranks import launch  # noqa: E402
from launched_run import TrainingLog  # noqa: E402
from rules import UNSHARDED_TOLERANCES  # noqa: E402

DDP_RANKS = (2, 1, 3)
# Samples of an iteration in the first fifth of the run, and after it; all numbers of ranks divide
# the first.
FEW_SAMPLES, MANY_SAMPLES = 12, 24
SEQ_LENGTH = 32
COMMON = (
    f"{DECODER} {PLAIN_TORCH} {REGULARIZATION} --bf16 --seed 7 --num-layers 2 --hidden-size 64"
    " --ffn-hidden-size 112 --group-query-attention --num-query-groups 2 --init-method-std 0.02"
    f" --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --optimizer muon {MUON}"
    " --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --log-interval 1"
    f" --tokenizer-type NullTokenizer --vocab-size {byte_dataset.VOCAB_SIZE} --num-workers 0"
    " --make-vocab-size-divisible-by 32 --split 95,5,0 --eval-iters 4"
)
SHARDED = f"{FSDP} {FP32_GRADIENTS} --data-parallel-sharding-strategy optim_grads_params"

# Root mean squares of differences over hundreds of losses of one distribution vary by less.
MOST_NOISE = 2.0
# Iterations of a segment after which nothing grows, at most half of it. Allocators settle for some
# more: memory and objects are judged over this many iterations, or not at all.
WARM_UP, LONG = 100, 300
EQUAL = ("threads", "groups", "files")
MOST_OBJECTS = 100
# The smallest matrix of Muon, 64 x 64, in bf16. The median over saves counts, as allocators take
# megabytes now and then.
MOST_BYTES_PER_ITERATION = 8192

type Losses = Mapping[int, float]


def resources() -> dict[str, int]:
    """Count what this process holds."""
    import torch.distributed as dist

    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threading.active_count(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def watch(path: Path) -> None:
    """Write what this rank holds before each save, when the save before it is complete."""
    from megatron.training import training

    def save(original: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        # The save itself begins with it.
        training.maybe_finalize_async_save(blocking=True)
        with open(f"{path}_{os.environ['RANK']}", "a") as file:
            file.write(json.dumps({"iteration": iteration, **resources()}) + "\n")
        original(iteration, *args, **kwargs)

    wrap(training, "save_checkpoint", save)


@dataclass
class Curves:
    """Losses of a training by iteration, over its restarts."""

    losses: dict[int, float]
    validation_losses: dict[int, float]


class Soak:
    """Trainings on the same samples."""

    def __init__(self, folder: Path, num_iterations: int, ranks: Sequence[int]) -> None:
        self._folder, self._ranks, self._last = folder, ranks, num_iterations
        self.length = num_iterations // len(ranks)
        self.interval = max(2, min(self.length, WARM_UP) // 4)
        files = byte_dataset.standard_library_files()
        data = byte_dataset.build_byte_dataset(files, folder / "data", 8_000_000)
        num_few = num_iterations // 5
        num_samples = num_few * FEW_SAMPLES + (num_iterations - num_few) * MANY_SAMPLES
        # The threshold is a number of tokens.
        grows = f"0:{FEW_SAMPLES} {num_few * FEW_SAMPLES * SEQ_LENGTH}:{MANY_SAMPLES}"
        self._flags = (
            *f"{COMMON} --data-path {data} --train-samples {num_samples}".split(),
            *f"--iterations-to-skip {self.length // 3} --eval-interval {self.interval}".split(),
            *("--step-batch-size-schedule", grows),
        )

    def _train(self, ranks: int, *flags: str, curves: Curves, before: Any = None) -> None:
        # Two microbatches after the batch size has grown.
        size = ("--micro-batch-size", str(FEW_SAMPLES // ranks))
        flags = (*self._flags, *size, *flags)
        run = launch(ranks, flags, before=before, timeout_s=7200.0).check()
        log = TrainingLog()
        for line in run.outputs[-1].splitlines():
            # Not the second validation of an iteration, on other samples, at the end of a run.
            if "on validation set" not in line:
                log.feed(line)
        curves.losses |= {int(record["iteration"]): record["loss"] for record in run.history}
        curves.validation_losses |= log.validation_losses

    def unsharded(self, ranks: int) -> Curves:
        """Train under DDP."""
        curves = Curves({}, {})
        self._train(ranks, curves=curves)
        return curves

    def sharded(self) -> Curves:
        """Train under Megatron-FSDP, restarted on other numbers of ranks."""
        curves, folder = Curves({}, {}), self._folder / "checkpoints"
        for number, ranks in enumerate(self._ranks):
            flags = f"{SHARDED} --async-save --save-interval {self.interval} --save {folder}"
            flags += f" --exit-interval {self.length}" + f" --load {folder}" * (number > 0)
            before = functools.partial(watch, self._folder / f"held_{number}")
            num_losses = len(curves.losses)
            self._train(ranks, *flags.split(), curves=curves, before=before)
            expected = self.length - (number == 0)
            assert len(curves.losses) - num_losses == expected, "the restart loaded nothing"
        return curves

    def held(self, number: int, rank: int) -> list[dict[str, int]]:
        """Read what a rank held at the saves of a segment, after its warm-up."""
        lines = (self._folder / f"held_{number}_{rank}").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        begin = number * self.length + min(WARM_UP, self.length // 2)
        return [record for record in records if record["iteration"] >= begin]


def growing(held: Sequence[Mapping[str, int]]) -> list[str]:
    """Return what a rank holds more and more of."""
    found = [key for key in EQUAL if len({record[key] for record in held}) > 1]
    if is_long(held):
        found += ["objects"] * (held[-1]["objects"] - held[0]["objects"] > MOST_OBJECTS)
        found += ["memory"] * (bytes_per_iteration(held) > MOST_BYTES_PER_ITERATION)
    return found


def is_long(held: Sequence[Mapping[str, int]]) -> bool:
    return held[-1]["iteration"] - held[0]["iteration"] >= LONG


def bytes_per_iteration(held: Sequence[Mapping[str, int]]) -> float:
    """Return the median growth of memory from one save to the next, per iteration."""
    growths = [after["memory"] - before["memory"] for before, after in itertools.pairwise(held)]
    num_iterations = held[-1]["iteration"] - held[0]["iteration"]
    return statistics.median(growths) * len(growths) / num_iterations


def rms(found: Losses, expected: Losses, iterations: Iterable[int]) -> float:
    """Return the root mean square of relative differences."""
    squares = [(found[i] / expected[i] - 1) ** 2 for i in iterations if i in expected]
    return math.sqrt(math.fsum(squares) / len(squares))


def largest(found: Losses, expected: Losses, iterations: Iterable[int]) -> float:
    """Return the largest relative difference."""
    return max(abs(found[i] / expected[i] - 1) for i in iterations if i in expected)


def judge_losses(sharded: Curves, unsharded: Sequence[Curves], last: int) -> bool:
    """Print how losses differ from DDP's, in each fifth of the run and at its end; judge them."""
    fifths = itertools.pairwise(last * fifth // 5 for fifth in range(6))
    spans = [
        *(range(begin + 1, end + 1) for begin, end in fifths),
        range(last - last // 20 + 1, last + 1),
    ]
    rows = [(f"{span[0]} to {span[-1]}", lambda run: run.losses, span) for span in spans]
    evaluated = sorted(sharded.validation_losses)[-5:]
    name = f"validation, {evaluated[0]} to {evaluated[-1]}"
    rows.append((name, lambda run: run.validation_losses, evaluated))
    print("| iterations | loss | of DDP | rms difference | of DDP runs | largest | of DDP runs | |")
    print(f"|{' --- |' * 8}")
    verdicts = []
    for name, losses, span in rows:
        ours, theirs = losses(sharded), [losses(run) for run in unsharded]
        means = sorted(_mean(run, span) for run in theirs)
        cells = [f"{_mean(ours, span):.3f}", f"{means[0]:.3f} to {means[-1]:.3f}"]
        for difference in (largest, rms):
            found = max(difference(ours, other, span) for other in theirs)
            noise = max(difference(a, b, span) for a, b in itertools.combinations(theirs, 2))
            cells[2:2] = [f"{found:.1e}", f"{noise:.1e}"]
        verdicts.append(found <= max(MOST_NOISE * noise, UNSHARDED_TOLERANCES["bf16"]))
        print(f"| {name} | {' | '.join(cells)} | {'noise' if verdicts[-1] else 'MORE'} |")
    return all(verdicts)


def _mean(losses: Losses, span: Iterable[int]) -> float:
    found = [losses[i] for i in span if i in losses]
    return math.fsum(found) / len(found)


def judge_resources(soak: Soak, ranks: Sequence[int]) -> bool:
    """Print what ranks held after the warm-up of each segment; judge it."""
    names = (*EQUAL, "objects", "MB of memory", "bytes per iteration")
    print(f"\n| segment | rank | {' | '.join(names)} | |\n|{' --- |' * 9}")
    verdicts = []
    for number, num_ranks in enumerate(ranks):
        for rank in range(num_ranks):
            held = soak.held(number, rank)
            found = growing(held)
            verdicts.append(not found)
            ends = [(held[0][key], held[-1][key]) for key in (*EQUAL, "objects")]
            ends.append((held[0]["memory"] // 10**6, held[-1]["memory"] // 10**6))
            cells = [str(a) if a == b else f"{a} to {b}" for a, b in ends]
            cells.append(f"{bytes_per_iteration(held):.0f}" if is_long(held) else "not judged")
            cells.append(f"GROWS: {', '.join(found)}" if found else "flat")
            print(f"| {number + 1} | {rank} of {num_ranks} | {' | '.join(cells)} |")
    return all(verdicts)


def drawing(sharded: Curves, unsharded: Sequence[Curves]) -> dict[str, dict[str, list]]:
    """Return what metrics_plot.py draws: losses, and differences from DDP over 20 iterations."""
    runs = {"Megatron-FSDP": sharded}
    runs |= {f"DDP, ranks: {n}": run for n, run in zip(DDP_RANKS, unsharded, strict=True)}
    found: dict[str, dict[str, list]] = {}
    for name, run in runs.items():
        ends = range(20, max(run.losses) + 1, 20)
        found[name] = {"loss": [(end, _mean(run.losses, range(end - 19, end + 1))) for end in ends]}
        if run is not unsharded[0]:
            differences = [
                (end, 100 * rms(run.losses, unsharded[0].losses, range(end - 19, end + 1)))
                for end in ends
            ]
            found[name]["difference from DDP, percent"] = differences
    return found


def main() -> int:
    """Train, print two tables, and write the curves where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 2], help="by segment")
    parser.add_argument("--output", type=Path, metavar="FILE", help="for metrics_plot.py")
    options = parser.parse_args()
    num_segments = len(options.ranks)
    if options.iterations % num_segments:
        parser.error(
            f"--iterations: expected a multiple of {num_segments} segments, got "
            f"{options.iterations}. Choose another number, or other --ranks."
        )
    if any(FEW_SAMPLES % ranks for ranks in options.ranks):
        parser.error(f"--ranks: expected divisors of {FEW_SAMPLES}, got {options.ranks}.")
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.iterations, options.ranks)
        sharded = soak.sharded()
        unsharded = [soak.unsharded(ranks) for ranks in DDP_RANKS]
        good = judge_losses(sharded, unsharded, options.iterations)
        good &= judge_resources(soak, options.ranks)
        if options.output is not None:
            options.output.write_text(json.dumps(drawing(sharded, unsharded)))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
