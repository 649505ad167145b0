# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time saving and loading with each optimizer under Megatron-FSDP, and count the bytes on disk.

    .venv/bin/python benchmarks/checkpoint.py --ranks 2 --hidden 512 --layers 4

Each run saves several times, a second run loads the last checkpoint. Times are Megatron's own
timers (slowest rank). The runs take turns, ``--passes`` times; a figure is the median over passes,
of saves that of a run's median save but the first.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from training_step import COMMON, RUNS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from launched_run import train

from megatron_muon.checkpoint.reading import find_checkpoint, read_checkpoint

NAMES = ("FSDP, adam", "FSDP, muon, owner")
NUM_SAVES = 4


def measure(options: argparse.Namespace, flags: str) -> dict[str, float]:
    """Save and load in a new folder; return milliseconds and bytes."""
    sizes = (
        f"--num-layers {options.layers} --hidden-size {options.hidden}"
        f" --ffn-hidden-size {3 * options.hidden} --global-batch-size {options.ranks}"
        f" --train-iters {NUM_SAVES + 1} --eval-interval 100000"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = f"{COMMON} {flags} {sizes}".split()
        saved = train(
            options.ranks,
            [*arguments, *f"--save {folder} --save-interval 1 --exit-interval {NUM_SAVES}".split()],
        )
        loaded = train(options.ranks, [*arguments, "--load", folder])
        checkpoint = read_checkpoint(find_checkpoint(Path(folder)))
        files = [path for path in checkpoint.folder.iterdir() if path.is_file()]
        state = [t for key, t in checkpoint.tensors.items() if key.startswith("optimizer.state.")]
        return {
            "save_ms": statistics.median(list(saved.save_ms.values())[1:]),
            "load_ms": loaded.load_ms,
            "bytes": sum(path.stat().st_size for path in files),
            "state_bytes": sum(math.prod(t.shape) * t.dtype.itemsize for t in state),
        }


def main() -> int:
    """Run everything in turn, print a table and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder by default")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for _ in range(options.passes):
        for name in NAMES:
            found[name].append(measure(options, RUNS[name]))
    results = {
        name: {key: statistics.median(each[key] for each in passes) for key in passes[0]}
        for name, passes in found.items()
    }
    adam = results[NAMES[0]]
    print("| run | save ms | / adam | load ms | / adam | MB | / adam | optimizer state MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, r in results.items():
        print(
            f"| {name} | {r['save_ms']:.0f} | {r['save_ms'] / adam['save_ms']:.2f} | "
            f"{r['load_ms']:.0f} | {r['load_ms'] / adam['load_ms']:.2f} | "
            f"{r['bytes'] / 1e6:.1f} | {r['bytes'] / adam['bytes']:.2f} | "
            f"{r['state_bytes'] / 1e6:.1f} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
