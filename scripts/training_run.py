# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One training run of the quickstart: its Megatron flags, its process, its progress."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import byte_dataset
from gpt_flags import DECODER, MUON, PLAIN_TORCH, REGULARIZATION
from launched_run import CPU_RANKS, PRETRAIN_GPT
from training_log import TrainingLog, failure_excerpt, was_ended_by_signal

REPOSITORY = Path(__file__).resolve().parent.parent
SEQ_LENGTH = 128
GLOBAL_BATCH_SIZE = 16
EVAL_ITERS = 10
MAX_RESTARTS = 2

MODEL = (
    f"{DECODER} --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --group-query-attention"
    " --num-query-groups 2 --init-method-std 0.02"
)
GLOO = "--distributed-backend gloo"
SHARDED = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
SCHEDULE = (
    f"--lr-decay-style cosine --lr-warmup-fraction 0.1 {REGULARIZATION}"
    " --adam-beta1 0.9 --adam-beta2 0.95"
)


@dataclass(frozen=True)
class RunConfig:
    """The settings in which runs differ."""

    optimizer: str
    learning_rate: float
    iterations: int
    ranks: int
    sharding: str
    seed: int
    data_prefix: Path
    num_validations: int = 6
    label: str = ""
    more_flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run's log file."""
        return f"{self.label or self.optimizer}-lr{self.learning_rate:g}"

    @property
    def eval_interval(self) -> int:
        """Iterations between two validations; one more, after the last iteration, always comes."""
        if self.num_validations == 1 or self.iterations < self.num_validations:
            return self.iterations + 1
        return self.iterations // self.num_validations

    def megatron_arguments(self) -> list[str]:
        """Return Megatron-LM's command line; optimizers differ in their own flags only."""
        arguments = f"{MODEL} {PLAIN_TORCH} {GLOO} {SHARDED} {SCHEDULE}".split()
        options = {
            "--seq-length": SEQ_LENGTH,
            "--max-position-embeddings": SEQ_LENGTH,
            "--micro-batch-size": GLOBAL_BATCH_SIZE // self.ranks,
            "--global-batch-size": GLOBAL_BATCH_SIZE,
            "--train-iters": self.iterations,
            "--lr": self.learning_rate,
            "--min-lr": self.learning_rate / 10,
            "--seed": self.seed,
            "--data-path": self.data_prefix,
            "--split": "95,5,0",
            "--tokenizer-type": "NullTokenizer",
            "--vocab-size": byte_dataset.VOCAB_SIZE,
            "--make-vocab-size-divisible-by": 32,
            "--num-workers": 0,
            "--eval-interval": self.eval_interval,
            "--eval-iters": EVAL_ITERS,
            "--log-interval": 1,
            "--logging-level": 20,
            "--timing-log-level": 1,
            "--timing-log-option": "max",
            "--data-parallel-sharding-strategy": self.sharding,
            "--optimizer": self.optimizer,
        }
        for name, value in options.items():
            arguments += [name, str(value)]
        # A diverged run is a result of the sweep, not an error.
        arguments.append("--no-check-for-nan-in-loss-and-grad")
        if self.sharding != "no_shard":
            arguments.append("--overlap-grad-reduce")
        if self.sharding == "optim_grads_params":
            arguments.append("--overlap-param-gather")
        if self.optimizer == "muon":
            arguments += f"{MUON} --muon-scale-mode spectral".split()
        return [*arguments, *self.more_flags]

    def command(self, log_folder: Path) -> list[str]:
        """Return the whole command; ``--tee 3`` puts the rank before each line."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(self.ranks), "--tee", "3"]
        torchrun += ["--log-dir", str(log_folder)]
        script = [str(CPU_RANKS), str(PRETRAIN_GPT)]
        return torchrun + script + self.megatron_arguments()

    def as_dict(self) -> dict[str, object]:
        """Return the fields as JSON can hold them."""
        return asdict(self) | {"data_prefix": str(self.data_prefix)}


class RunFailedError(RuntimeError):
    """A training run ended with an error; the message holds its last lines."""


class Progress:
    """Prints a compact line every ``interval`` iterations."""

    def __init__(self, config: RunConfig, interval: int) -> None:
        self.config = config
        self.interval = interval
        self.previous: tuple[int, float] | None = None

    def show(self, log: TrainingLog) -> None:
        """Print the iteration that ``log`` stands at, if its turn has come."""
        i, total = log.iteration, self.config.iterations
        if i == 1:
            self.previous = (1, time.monotonic())
        if i != total and i % self.interval:
            return
        pace = ""
        if self.previous and i > self.previous[0]:
            now = time.monotonic()
            seconds = (now - self.previous[1]) / (i - self.previous[0])
            self.previous = (i, now)
            pace = f"  {seconds * 1000:5.0f} ms/step  {seconds * (total - i):4.0f} s left"
        width = len(str(total))
        print(
            f"  {self.config.name}  {i:{width}d}/{total}  loss {log.losses[i]:.4f}{pace}",
            flush=True,
        )


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    # GPUs are hidden, as the ranks compute on the CPU.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",
    }
    # A new session: Ctrl-C reaches torchrun once, as the SIGTERM below, and torchrun then
    # ends its ranks.
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def finished_log(config: RunConfig, log_file: Path) -> TrainingLog | None:
    """Return the numbers of an earlier run of the very same command that reached its end."""
    if not log_file.exists():
        return None
    with log_file.open(errors="replace") as file:
        if file.readline().rstrip("\n") != shlex.join(config.command(rank_folder(log_file))):
            return None
        log = TrainingLog()
        for line in file:
            log.feed(line)
    return log if log.is_complete else None


def rank_folder(log_file: Path) -> Path:
    """Return where torchrun keeps each rank's own output."""
    return log_file.with_suffix(".ranks")


def train(config: RunConfig, log_file: Path, progress_interval: int) -> TrainingLog:
    """Run one training to its end.

    A run whose rank a signal ended (a fault of native code, seen under gloo on a busy machine)
    starts over, from the same seed; this is printed, and the log of the crash is kept.

    Args:
        config: What to run.
        log_file: Where all that the ranks print goes.
        progress_interval: Iterations between two progress lines; 0 prints none.

    Returns:
        The run's numbers.

    Raises:
        RunFailedError: The run ended short of its last validation.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(MAX_RESTARTS + 1):
        progress = Progress(config, progress_interval) if progress_interval else None
        returncode, log, lines = _train_once(config, log_file, progress)
        if log.is_complete:
            if returncode:
                # Every number is there: a crash at exit costs none of them.
                _warn(f"{config.name}: exit status {returncode} after the end, see {log_file}")
            return log
        if not was_ended_by_signal(lines) or attempt == MAX_RESTARTS:
            break
        crash_log = log_file.with_suffix(f".crash{attempt + 1}.log")
        log_file.rename(crash_log)
        _warn(f"{config.name}: a rank crashed at iteration {log.iteration}, see {crash_log}")
        _warn(f"{config.name}: starts over")
    excerpt = "\n".join(failure_excerpt(lines))
    raise RunFailedError(
        f"{excerpt}\n\n{config.name}: expected {config.iterations} iterations, got "
        f"{log.iteration} and exit status {returncode}. The whole log: {log_file}"
    )


def _train_once(
    config: RunConfig, log_file: Path, progress: Progress | None
) -> tuple[int, TrainingLog, list[str]]:
    """Run the command once; return its exit status, its numbers and its lines."""
    command = config.command(rank_folder(log_file))
    log, lines = TrainingLog(), []
    with log_file.open("w") as file, _running(command) as process:
        file.write(shlex.join(command) + "\n")
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            lines.append(line)
            if log.feed(line):
                file.flush()
                if progress:
                    progress.show(log)
        return process.wait(), log, lines


def _warn(message: str) -> None:
    print(f"  {message}", file=sys.stderr, flush=True)
