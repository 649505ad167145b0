# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with Muon and with Adam under Megatron-FSDP, on this machine, and compare.

Needs no GPU and no download: the text is the source code of Python's standard library, read byte
by byte. Called by ``scripts/quickstart.sh``, which builds the environment first; see
``docs/quickstart.md``.
"""

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

import byte_dataset
from comparison_report import write_comparison
from learning_rate_sweep import best, run_sweep, write_sweep
from training_run import (
    GLOBAL_BATCH_SIZE,
    REPOSITORY,
    RunConfig,
    RunFailedError,
    finished_log,
    train,
)

# From the sweep recorded in docs/quickstart.md.
LEARNING_RATES = {"muon": 1.6e-2, "adam": 2e-3}
SWEEP_GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
ITERATIONS = 60


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the command line's options with the defaults filled in; exit where they disagree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, nargs="+", help="files or folders; default: Python's library")
    add("--output", type=Path, default=REPOSITORY / "quickstart_output", help="folder")
    add("--max-megabytes", type=float, default=8, help="text to take at most (default: 8)")
    add("--iterations", type=int, default=ITERATIONS, help=f"of each run (default: {ITERATIONS})")
    add("--optimizers", nargs="+", default=["muon", "adam"], choices=list(LEARNING_RATES))
    add(
        "--learning-rates",
        type=float,
        nargs="+",
        help="one for each of --optimizers, in order; with --sweep, the first grid",
    )
    add("--ranks", type=int, default=2, help="processes to shard over (default: 2)")
    add(
        "--sharding",
        default="optim_grads_params",
        choices=["no_shard", "optim", "optim_grads", "optim_grads_params"],
        help="what Megatron-FSDP shards, ZeRO-0 to ZeRO-3 (default: optim_grads_params)",
    )
    add("--seed", type=int, default=1234)
    add("--sweep", action="store_true", help="find each optimizer's learning rate on one grid")
    options = parser.parse_args(arguments)
    if options.learning_rates is None:
        rates = SWEEP_GRID if options.sweep else [LEARNING_RATES[x] for x in options.optimizers]
        options.learning_rates = list(rates)
    if not options.sweep and len(options.learning_rates) != len(options.optimizers):
        parser.error(
            f"--learning-rates: expected {len(options.optimizers)} values, one an optimizer, "
            f"got {len(options.learning_rates)}"
        )
    if len(set(options.optimizers)) != len(options.optimizers):
        parser.error(f"--optimizers: expected each once, got {options.optimizers}")
    if options.ranks < 1 or GLOBAL_BATCH_SIZE % options.ranks:
        parser.error(f"--ranks: expected a divisor of {GLOBAL_BATCH_SIZE}, got {options.ranks}")
    if options.iterations < 1:
        parser.error(f"--iterations: expected at least 1, got {options.iterations}")
    options.output = options.output.resolve()
    return options


def prepare_data(options: argparse.Namespace) -> Path:
    """Build the data set and return its prefix."""
    if options.data:
        files = byte_dataset.files_below(options.data)
    else:
        files = byte_dataset.standard_library_files()
    max_bytes = int(options.max_megabytes * 1_000_000)
    data = byte_dataset.build_byte_dataset(files, options.output / "data", max_bytes)
    print(
        f"Data: {data.num_bytes / 1e6:.1f} MB, {data.num_documents} documents, {data.prefix}.bin",
        flush=True,
    )
    return data.prefix


def run_config(
    options: argparse.Namespace, data_prefix: Path, optimizer: str, learning_rate: float
) -> RunConfig:
    """Return the run of one optimizer at one learning rate."""
    return RunConfig(
        optimizer=optimizer,
        learning_rate=learning_rate,
        iterations=options.iterations,
        ranks=options.ranks,
        sharding=options.sharding,
        seed=options.seed,
        data_prefix=data_prefix,
        num_validations=1 if options.sweep else 4,
    )


def compare(options: argparse.Namespace, data_prefix: Path, command: str) -> None:
    """Train with each optimizer in turn and report."""
    results = []
    for optimizer, rate in zip(options.optimizers, options.learning_rates, strict=True):
        config = run_config(options, data_prefix, optimizer, rate)
        log_file = options.output / "logs" / f"{config.name}.log"
        print(f"{optimizer}: {options.ranks} ranks start, log in {log_file}", flush=True)
        interval = max(1, options.iterations // 12)
        results.append((config, train(config, log_file, interval)))
    table = write_comparison(results, options.output, command)
    print(f"\n{table}\n\nTable, numbers and curves: {options.output}/results.md, .json, .svg")


def sweep(options: argparse.Namespace, data_prefix: Path, command: str) -> None:
    """Find each optimizer's learning rate and report; runs that an earlier call finished count."""

    def run(optimizer: str, rate: float) -> float:
        """Train once and return the validation loss."""
        config = run_config(options, data_prefix, optimizer, rate)
        log_file = options.output / "sweep_logs" / f"{config.name}.log"
        start = time.monotonic()
        log = finished_log(config, log_file)
        took = "ran before"
        if log is None:
            log = train(config, log_file, progress_interval=0)
            took = f"{time.monotonic() - start:.0f} s"
        loss = log.final_validation_loss()
        print(f"  {config.name}: validation loss {loss:.4f}, {took}", flush=True)
        return loss

    losses = run_sweep(options.optimizers, options.learning_rates, run)
    file = options.output / "sweep.md"
    print(f"\n{write_sweep(losses, file, command, options.iterations)}\n")
    for optimizer, by_rate in losses.items():
        print(f"{optimizer}: best at {best(by_rate):g}")
    print(f"Table: {file}")


def main(arguments: list[str]) -> int:
    """Run what the command line asks for; return the exit status."""
    options = parse_arguments(arguments)
    # A terminated quickstart ends its ranks as one interrupted by Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    command = shlex.join(["bash", "scripts/quickstart.sh", *arguments])
    try:
        data_prefix = prepare_data(options)
        (sweep if options.sweep else compare)(options, data_prefix, command)
    except (RunFailedError, ValueError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted", file=sys.stderr)
        return 130
    print(f"Took {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
