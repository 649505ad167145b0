# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Kill a rank inside a step, measure how long the others live, and start the same command again.

    .venv/bin/python scripts/killed_rank.py --ranks 2 --json FILE

A small GPT in bf16 under Megatron-FSDP, ZeRO-3, is trained through torchrun and the launcher, on
GPUs over NCCL if there are enough, otherwise on gloo CPU ranks. It saves every ``SAVE_INTERVAL``
iterations. The last rank gets SIGKILL when its exchange of step ``KILLED_STEP`` begins. Time is
counted from the signal until no rank is left, and until torchrun has ended. The same command then
resumes from the last save, and its losses, unrounded, are compared with those of a run that was
not killed.

CPU ranks must have the same losses to the bit. On GPUs they may differ by ``TOLERANCE``, relative,
that of bf16 runs in docs/numerics.md: kernels of a backward pass may add in any order. The command
ends with 1 if a rank is left, or if losses or the resumed iteration are others.
``tests/functional/kill_saves.py`` kills ranks in saves.
"""

import argparse
import functools
import json
import os
import re
import runpy
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent / "tests" / "functional")]

LAST, SAVE_INTERVAL, KILLED_STEP = 6, 2, 5
TOLERANCE = 1.5e-4
# Called once in a step, when its messages begin.
EXCHANGE = "megatron_muon.runtime.engine.Engine.orthogonalize"
# Variables of the ranks: a folder for notes, and the rank to kill.
NOTES, VICTIM = "KILLED_RANK_NOTES", "KILLED_RANK_VICTIM"
# Processes of other ranks are looked for until then.
LIMIT_S = 300.0


def train_rank() -> None:
    """Train as a rank of torchrun, which may be killed."""
    from kill_saves import die, strike
    from launched_run import PRETRAIN_GPT

    notes, rank = Path(os.environ[NOTES]), os.environ["RANK"]
    (notes / f"pid_{rank}").write_text(str(os.getpid()))

    def kill() -> None:
        """Note the time, which all processes of a machine share, and end."""
        (notes / "killed").write_text(repr(time.monotonic()))
        die()

    if (victim := os.environ.get(VICTIM)) is not None:
        strike(EXCHANGE, int(victim), KILLED_STEP, 0.0, kill)
    runpy.run_path(str(PRETRAIN_GPT), run_name="__main__")


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not yet waited for does not."""
    try:
        # Its name, in parentheses, may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def seconds_since_kill(notes: Path) -> float | None:
    """Return the time since the kill; None before it."""
    text = (notes / "killed").read_text() if (notes / "killed").is_file() else ""
    return time.monotonic() - float(text) if text else None


def watch(notes: Path, is_over: threading.Event, found: dict[str, Any]) -> None:
    """Note how long after the kill no rank is left; give up some time after the command ended."""
    deadline = float("inf")
    while time.monotonic() < deadline:
        if is_over.is_set():
            deadline = min(deadline, time.monotonic() + LIMIT_S)
        if (seconds := seconds_since_kill(notes)) is not None:
            pids = [int(path.read_text()) for path in notes.glob("pid_*")]
            if not any(map(is_running, pids)):
                found.update(seconds_until_all_ended=seconds, others_ended=True)
                return
        elif is_over.is_set():
            return
        time.sleep(0.02)


def message_of(log: str) -> str:
    """Return the signal that torchrun names, and the error of another rank, if it has one."""
    signals = re.findall(r"Signal 9 \(SIGKILL\) received by PID \d+", log)
    errors = re.findall(r"^\[rank\d+\]: (\w*Error: .*)$", log, re.MULTILINE)
    return "; ".join([*signals[:1], *errors[:1]])


def killed_run(ranks: int, train: Any, notes: Path) -> dict[str, Any]:
    """Train until a rank is killed; return the case."""
    found: dict[str, Any] = {"seconds_until_all_ended": None, "others_ended": False}
    is_over = threading.Event()
    watcher = threading.Thread(target=watch, args=(notes, is_over, found))
    watcher.start()
    ended = "well"
    try:
        train(environment={NOTES: str(notes), VICTIM: str(ranks - 1)})
    except RuntimeError as error:
        found["seconds_until_command_ended"] = seconds_since_kill(notes)
        ended = str(error)
    finally:
        is_over.set()
        watcher.join()
    if seconds_since_kill(notes) is None or ended == "well":
        raise RuntimeError(f"expected a run that a killed rank ends, got one that ended {ended}")
    return {**found, "message": message_of((notes / "log.txt").read_text())}


def compare(
    losses: Mapping[int, float], expected: Mapping[int, float], *, is_exact: bool
) -> dict[str, Any]:
    """Compare the losses of a resumed run with those of a run that was not killed.

    Args:
        losses: By iteration, from the first one after the resumption.
        expected: By iteration, of the whole run.
        is_exact: Whether losses must be equal.
    """
    resumed_at = min(losses) - 1
    differences = {i: abs(loss - expected[i]) for i, loss in losses.items()}
    is_near = all(differences[i] <= TOLERANCE * abs(expected[i]) for i in losses)
    equal = all(expected[i] == loss for i, loss in losses.items())
    last_save = (KILLED_STEP - 1) // SAVE_INTERVAL * SAVE_INTERVAL
    is_whole = sorted(losses) == list(range(last_save + 1, LAST + 1))
    return {
        "resumed_at": resumed_at,
        "largest_difference": max(differences.values()),
        "equal": equal,
        "holds": is_whole and (equal if is_exact else is_near),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Train three times; return both cases."""
    from parity import BF16, FP32_GRADIENTS, ZERO3, exact_losses, gpt_flags, uses_gpus

    ranks, checkpoints = options.ranks, folder / "checkpoints"
    flags = f"{gpt_flags(ranks, LAST, options.hidden, options.layers)} {ZERO3} {BF16}"
    flags += f" {FP32_GRADIENTS} --distributed-timeout-minutes 2"
    expected = exact_losses(ranks, flags, folder / "reference")
    flags += f" --save {checkpoints} --load {checkpoints} --save-interval {SAVE_INTERVAL}"
    train = functools.partial(exact_losses, ranks, flags, script=Path(__file__).resolve())
    runs = {}
    for name in ("killed", "resumed"):
        runs[name] = functools.partial(train, folder / name)
        (folder / name).mkdir()
    killed = killed_run(ranks, runs["killed"], folder / "killed")
    losses = runs["resumed"](environment={NOTES: str(folder / "resumed")})
    restart = compare(losses, expected, is_exact=not uses_gpus(ranks))
    return {"step": killed, "restart": restart}


def lines(ranks: int, step: Mapping[str, Any], restart: Mapping[str, Any]) -> list[str]:
    """Return a table, and below it the message."""
    times = [step["seconds_until_all_ended"], step["seconds_until_command_ended"]]
    cells = ["-" if seconds is None else f"{seconds:.1f}" for seconds in times]
    holds = step["others_ended"] and restart["holds"]
    verdict = "FAILS" if not holds else "equal" if restart["equal"] else "holds"
    cells += [str(restart["resumed_at"]), f"{restart['largest_difference']:.1e}", verdict]
    return [
        "| ranks | ended after, s | torchrun, s | resumed at | largest difference | |",
        f"|{' --- |' * 6}",
        f"| {ranks} | {' | '.join(cells)} |",
        step["message"],
    ]


def main() -> int:
    """Kill and resume, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cases here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            cases = measure(options, Path(folder))
        except RuntimeError as error:  # a run failed: that is the result
            cases = {"step": {"error": str(error)}}
    if options.json is not None:
        setup = {name: getattr(options, name) for name in ("ranks", "hidden", "layers")}
        options.json.write_text(json.dumps({"setup": setup, "cases": cases}, indent=1) + "\n")
    if "error" in cases["step"]:
        print(cases["step"]["error"])
        return 1
    print(*lines(options.ranks, **cases), sep="\n")
    return int(not (cases["step"]["others_ended"] and cases["restart"]["holds"]))


if __name__ == "__main__":
    if NOTES in os.environ:
        train_rank()
    else:
        sys.exit(main())
