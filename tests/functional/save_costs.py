# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Measure for how long saves block training, and their CPU memory; print a table.

    .venv/bin/python tests/functional/save_costs.py --hidden 512 --layers 8

A GPT under Megatron-FSDP is saved every five iterations with Muon and with Adam, synchronously and
asynchronously. A save blocks training in its own call, and in calls that ask whether it is written
until it is complete. Its memory is a rank's peak in its own call, above what the rank had before.
Figures are medians over saves but the first, which allocates, of the slowest or largest rank, and
the least time, as a busy machine makes saves slower.
"""

import argparse
import ctypes
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / name) for name in ("scripts", "benchmarks", "tests/unit_tests", "")]

from helpers.checkpoint_runs import wrap  # noqa: E402
from helpers.ranks import launch  # noqa: E402
from training_step import COMMON, NUM_SAVES, RUNS, SAVE_INTERVAL  # noqa: E402

from megatron_muon.mcore.checkpoint_folders import find_checkpoint  # noqa: E402

OPTIMIZERS = {"Adam": RUNS["FSDP, adam"], "Muon": RUNS["FSDP, muon, owner"]}
KINDS = {"synchronous": "", "asynchronous": " --async-save"}


def memory(kind: str) -> int:
    """Return bytes of CPU memory of this process: ``VmRSS`` now, ``VmHWM`` the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def watch(path: Path) -> None:
    """Write the cost of each save on this rank."""
    from megatron.training import async_utils, training

    costs: list[float] = []
    # M_MMAP_THRESHOLD: what a tensor frees is not kept, so that all that it uses is seen.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)

    def timed(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        start = time.monotonic()
        original(*args, **kwargs)
        if costs:
            costs[0] += time.monotonic() - start
            if async_utils.is_empty_async_queue():
                with open(f"{path}_{os.environ['RANK']}", "a") as file:
                    file.write(json.dumps(costs) + "\n")
                costs.clear()

    def call(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        training.maybe_finalize_async_save(blocking=True)
        costs[:] = 0.0, 0
        timed(original, *args, **kwargs)

    def save(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        before = memory("VmRSS")
        # Sets the peak to it.
        Path("/proc/self/clear_refs").write_text("5")
        original(*args, **kwargs)
        costs[1] = memory("VmHWM") - before

    wrap(training, "save_checkpoint_and_time", call)
    wrap(training, "save_checkpoint", save)
    wrap(training, "maybe_finalize_async_save", timed)


def measure(flags: str, ranks: int) -> list[str]:
    """Train and save; return the cells of a row."""
    last = NUM_SAVES * SAVE_INTERVAL
    with tempfile.TemporaryDirectory() as folder:
        saves = f"--save {folder}/saved --save-interval {SAVE_INTERVAL} --train-iters {last + 2}"
        before = functools.partial(watch, Path(folder) / "costs")
        flags = f"{COMMON} {flags} {saves} --eval-interval 100000 --lr-decay-iters 100"
        launch(ranks, flags.split(), before=before, timeout_s=3600.0).check()
        lines = [(Path(folder) / f"costs_{rank}").read_text().splitlines() for rank in range(ranks)]
        costs = [list(map(json.loads, of_ranks)) for of_ranks in zip(*lines, strict=True)]
        # Of the slowest and the largest rank.
        blocked_s = [max(cost[0] for cost in save) for save in costs[1:NUM_SAVES]]
        most_bytes = [max(cost[1] for cost in save) for save in costs[1:NUM_SAVES]]
        files = find_checkpoint(Path(folder) / "saved").glob("*.distcp")
        file_bytes = max(file.stat().st_size for file in files)
        return [
            *(f"{seconds:.2f} s" for seconds in (statistics.median(blocked_s), min(blocked_s))),
            *(f"{size / 1e6:.0f} MB" for size in (statistics.median(most_bytes), file_bytes)),
        ]


def main() -> int:
    """Print a row per optimizer and kind of save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    sizes = (
        f"--num-layers {options.layers} --hidden-size {options.hidden}"
        f" --ffn-hidden-size {3 * options.hidden} --global-batch-size {options.ranks}"
    )
    print("| save | blocks for | at least | CPU memory of a rank | file of a rank |")
    print("| --- | --- | --- | --- | --- |")
    for optimizer, flags in OPTIMIZERS.items():
        for kind, own in KINDS.items():
            cells = measure(f"{flags}{own} {sizes}", options.ranks)
            print(f"| {optimizer}, {kind} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
