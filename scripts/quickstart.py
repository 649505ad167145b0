# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with Muon and with Adam under Megatron-FSDP, on this machine, and compare.

Needs no GPU and no download: the text is the source code of Python's standard library, read byte
by byte. Called by ``scripts/quickstart.sh``, which builds the environment first; see
``docs/quickstart.md``.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import byte_dataset
from gpt_flags import DECODER, FSDP, MUON, PLAIN_TORCH, REGULARIZATION
from launched_run import TrainingLog, settled_median, train

REPOSITORY = Path(__file__).resolve().parent.parent
# From a sweep over one grid for both, docs/quickstart.md.
LEARNING_RATES = {"muon": 1.6e-2, "adam": 2e-3, "soap": 4e-3}
SEQ_LENGTH = 128
GLOBAL_BATCH_SIZE = 16
MODEL = (
    f"{DECODER} --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --group-query-attention"
    f" --num-query-groups 2 --init-method-std 0.02 --seq-length {SEQ_LENGTH}"
    f" --max-position-embeddings {SEQ_LENGTH}"
)
SCHEDULE = (
    f"--lr-decay-style cosine --lr-warmup-fraction 0.1 {REGULARIZATION}"
    f" --adam-beta1 0.9 --adam-beta2 0.95 --global-batch-size {GLOBAL_BATCH_SIZE}"
)
DATA = (
    f"--split 95,5,0 --tokenizer-type NullTokenizer --vocab-size {byte_dataset.VOCAB_SIZE}"
    " --make-vocab-size-divisible-by 32 --num-workers 0 --eval-iters 10"
)
# A loss that diverges is a result, not an error.
LOG = (
    "--log-interval 1 --logging-level 20 --timing-log-level 1 --timing-log-option max"
    " --no-check-for-nan-in-loss-and-grad"
)
# ZeRO-3.
SHARDED = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params --distributed-backend gloo"
# GPUs are hidden, as the ranks compute on the CPU.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "PYTHONFAULTHANDLER": "1",
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the command line's options with the defaults filled in; exit where they disagree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, default=REPOSITORY / "quickstart_output", help="folder")
    add("--max-megabytes", type=float, default=8, help="text to take at most (default: 8)")
    add("--iterations", type=int, default=60, help="of each run (default: 60)")
    add("--optimizers", nargs="+", default=["muon", "adam"], choices=list(LEARNING_RATES))
    add("--learning-rates", type=float, nargs="+", help="in the order of --optimizers")
    add("--newton-schulz", default="standard", help="see docs/performance.md (standard)")
    add("--ranks", type=int, default=2, help="processes to shard over (default: 2)")
    add("--metrics", action="store_true", help="log Muon's to TensorBoard, under the output folder")
    options = parser.parse_args(arguments)
    rates = options.learning_rates or [LEARNING_RATES[name] for name in options.optimizers]
    if len(rates) != len(set(options.optimizers)):
        parser.error(
            f"--learning-rates: expected one for each optimizer, got {rates} for "
            f"{options.optimizers}"
        )
    options.learning_rates = rates
    if options.ranks < 1 or GLOBAL_BATCH_SIZE % options.ranks:
        parser.error(f"--ranks: expected a divisor of {GLOBAL_BATCH_SIZE}, got {options.ranks}")
    options.output = options.output.resolve()
    return options


def prepare_data(options: argparse.Namespace) -> Path:
    """Build the data set and return its prefix."""
    files = byte_dataset.standard_library_files()
    max_bytes = int(options.max_megabytes * 1_000_000)
    prefix = byte_dataset.build_byte_dataset(files, options.output / "data", max_bytes)
    print(f"Data: {prefix}.bin", flush=True)
    return prefix


def megatron_flags(
    options: argparse.Namespace, data_prefix: Path, optimizer: str, learning_rate: float
) -> list[str]:
    """Return the flags of a run, the optimizer's flags last."""
    run = (
        f"--train-iters {options.iterations} --seed 1234"
        f" --micro-batch-size {GLOBAL_BATCH_SIZE // options.ranks}"
        f" --eval-interval {max(1, options.iterations // 4)}"
    )
    flags = f"{MODEL} {PLAIN_TORCH} {SCHEDULE} {DATA} {LOG} {SHARDED} {run}".split()
    own = f"--lr {learning_rate} --min-lr {learning_rate / 10} --optimizer {optimizer}"
    if optimizer == "muon":
        own += f" {MUON} --muon-scale-mode spectral"
        own += f" --muon-fsdp-newton-schulz {options.newton_schulz}"
        if options.metrics:
            own += " --muon-fsdp-log-metrics --tensorboard-log-interval 1"
            own += f" --tensorboard-dir {options.output / 'tensorboard'}"
    return [*flags, "--data-path", str(data_prefix), *own.split()]


def run(
    options: argparse.Namespace, data_prefix: Path, optimizer: str, learning_rate: float
) -> TrainingLog:
    """Train with one optimizer, and print the loss of about every twelfth iteration."""
    log_file = options.output / "logs" / f"{optimizer}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    print(f"{optimizer}: {options.ranks} ranks start, log in {log_file}", flush=True)
    total, interval = options.iterations, max(1, options.iterations // 12)

    def show(log: TrainingLog) -> None:
        """Print an iteration."""
        i = log.iteration
        if i == total or i % interval == 0:
            ms = settled_median(log.step_ms)
            loss = f"loss {log.losses[i]:.4f}"
            print(f"  {optimizer}  {i:3d}/{total}  {loss}  {ms:5.0f} ms/step", flush=True)

    return train(
        options.ranks,
        megatron_flags(options, data_prefix, optimizer, learning_rate),
        environment=ENVIRONMENT,
        log_file=log_file,
        on_iteration=show,
    )


def comparison_table(logs: dict[str, TrainingLog], rates: list[float], iterations: int) -> str:
    """Return the table of all runs, a column each, in Markdown."""
    rows = [["", *logs], ["---", *("---:" for _ in logs)]]
    rows.append(["learning rate", *(f"{rate:g}" for rate in rates)])

    def add(label: str, digits: int, value: Callable[[TrainingLog], float]) -> None:
        """Add a row; a loss that diverged is not finite."""
        values = map(value, logs.values())
        cells = (f"{x:.{digits}f}" if math.isfinite(x) else "diverged" for x in values)
        rows.append([label, *cells])

    for mark in sorted({iterations * part // 6 for part in range(1, 7)} - {0}):
        add(f"training loss at {mark} (mean of 10)", 4, lambda log, mark=mark: log.mean_loss(mark))
    # Every run ends with a validation.
    add("validation loss, final", 4, lambda log: list(log.validation_losses.values())[-1])
    add("ms per step (median)", 1, lambda log: settled_median(log.step_ms))
    add("optimizer ms per step (median)", 1, lambda log: settled_median(log.optimizer_ms))
    return "\n".join(
        f"| {row[0]:<32} | " + " | ".join(f"{x:>8}" for x in row[1:]) + " |" for row in rows
    )


def write_json(logs: dict[str, TrainingLog], rates: list[float], file: Path) -> None:
    """Write all numbers of all runs, those that are not finite as null."""
    runs = [
        {"optimizer": optimizer, "learning_rate": rate, **asdict(log)}
        for (optimizer, log), rate in zip(logs.items(), rates, strict=True)
    ]
    finite = json.loads(json.dumps(runs), parse_constant=lambda _: None)
    file.write_text(json.dumps(finite, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Train with each optimizer in turn, and compare; return the exit status."""
    options = parse_arguments(arguments)
    # A terminated quickstart ends its ranks as one interrupted by Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    try:
        prefix = prepare_data(options)
        rates = dict(zip(options.optimizers, options.learning_rates, strict=True))
        logs = {name: run(options, prefix, name, rate) for name, rate in rates.items()}
    except (RuntimeError, ValueError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted", file=sys.stderr)
        return 130
    table = comparison_table(logs, list(rates.values()), options.iterations)
    (options.output / "results.md").write_text(table + "\n")
    write_json(logs, list(rates.values()), options.output / "results.json")
    print(f"\n{table}\n\nTable and numbers: {options.output}/results.md, .json")
    print(f"Took {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
