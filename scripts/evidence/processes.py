# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A command with a time limit, and the end of all processes that it started.

torchrun starts its ranks in sessions of their own, so a process group does not hold them all.
Processes are found by a variable of their environment, which children inherit.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from evidence.machine import ROOT

_VARIABLE = "MEGATRON_MUON_EVIDENCE"
# After SIGTERM, which torchrun passes on to its ranks.
_GRACE_S = 10.0


class Ended(NamedTuple):
    """End of a command.

    Args:
        exit_code: None if the time limit ended it.
        seconds: Its wall time.
    """

    exit_code: int | None
    seconds: float


def run_limited(
    command: Sequence[str], log: Path, limit_s: float, mark: str, variables: Mapping[str, str]
) -> Ended:
    """Run a command, and end it and every process that it started at the limit.

    Args:
        command: Program and arguments.
        log: File for its output.
        limit_s: Seconds until it is ended.
        mark: Tells these processes from all others.
        variables: Its environment.
    """
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**variables, _VARIABLE: mark},
            start_new_session=True,
        )
        try:
            exit_code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            # After an error of a piece too: a rank that is left would hold its GPU.
            end_processes(mark)
            process.wait()
    return Ended(exit_code, time.monotonic() - start)


def end_processes(mark: str) -> None:
    """End all processes that have a mark, first by SIGTERM."""
    _signal_all(mark, signal.SIGTERM)
    give_up = time.monotonic() + _GRACE_S
    while _with_mark(mark) and time.monotonic() < give_up:
        time.sleep(0.1)
    # Again and again: a process may start another one meanwhile.
    while _signal_all(mark, signal.SIGKILL):
        time.sleep(0.1)


def _signal_all(mark: str, number: signal.Signals) -> bool:
    found = _with_mark(mark)
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return bool(found)


def _with_mark(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Ended meanwhile, or of another user. Of a zombie it is empty.
        with contextlib.suppress(OSError):
            if f"{_VARIABLE}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
