# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train the quickstart's model with the Gram form beside two seeds of the standard steps.

    .venv/bin/python benchmarks/backends_train.py --output FOLDER

All runs have the quickstart's flags, data and learning rate. On CPU ranks the Gram form multiplies
in fp32 and rounds its results to bf16. The last checkpoint of the first run is kept in
FOLDER/checkpoint, for newton_schulz_error.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import byte_dataset  # noqa: E402
from comparison_report import comparison_table  # noqa: E402
from quickstart import ITERATIONS, LEARNING_RATES  # noqa: E402
from training_run import RunConfig, train  # noqa: E402

GRAM = ("--muon-fsdp-newton-schulz", "gram")


def main() -> int:
    """Train three times and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for data and logs")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--max-megabytes", type=float, default=8)
    options = parser.parse_args()
    output = options.output.resolve()
    data = byte_dataset.build_byte_dataset(
        byte_dataset.standard_library_files(), output / "data", int(options.max_megabytes * 1e6)
    )
    save = ("--save", str(output / "checkpoint"), "--save-interval", str(options.iterations))
    results = []
    for label, seed, flags in (
        ("standard, seed 1234", 1234, save),
        ("standard, seed 1235", 1235, ()),
        ("gram, seed 1234", 1234, GRAM),
    ):
        config = RunConfig(
            optimizer="muon",
            learning_rate=LEARNING_RATES["muon"],
            iterations=options.iterations,
            ranks=2,
            sharding="optim_grads_params",
            seed=seed,
            data_prefix=data.prefix,
            label=label,
            more_flags=flags,
        )
        log_file = output / "logs" / f"{config.name.replace(', ', '-').replace(' ', '-')}.log"
        print(f"{label}: log in {log_file}", flush=True)
        results.append((config, train(config, log_file, progress_interval=0)))
    print(f"\n{comparison_table(results)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
