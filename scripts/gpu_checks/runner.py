# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run checks, each in a process of its own: one that fails, hangs or crashes ends no other."""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from gpu_checks.catalogue import Check
from gpu_checks.report import Context, Device, Findings, NotPossibleError, Report, read_findings
from gpu_checks.tables import Line, Word

# Most lines of a failed check's output that are kept.
_OUTPUT_LINES = 60


class Runner:
    """Run checks until their limits.

    Args:
        device: Of all checks.
        is_rehearsal: Whether checks that need a GPU run on the CPU with tiny sizes.
        limit_s: Seconds for all checks together; those that could not start then have failed.
        patience: How many times longer than its limit each check may take.
        jobs: Checks that run at once.
        preload: Modules that are imported once, in the server that the processes are forked from.
            None on a GPU: a process that has touched CUDA cannot be forked.
    """

    def __init__(
        self,
        device: Device,
        *,
        is_rehearsal: bool = False,
        limit_s: float = 870.0,
        patience: float = 1.0,
        jobs: int = 1,
        preload: Sequence[str] = (),
    ) -> None:
        self._device: Device = device
        self._is_rehearsal = is_rehearsal
        self._jobs = jobs
        self._patience = patience
        self._deadline = time.monotonic() + limit_s
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(list(preload))

    def run_all(self, checks: Sequence[Check]) -> Iterator[Line]:
        """Run checks, several at once, then those that need to be alone; yield lines as they end.

        The longest start first.
        """
        others = [check for check in checks if not check.is_alone]
        waiting = deque(sorted(others, key=lambda check: -check.limit_s))
        waiting += [check for check in checks if check.is_alone]
        running: list[_Run] = []
        while waiting or running:
            while waiting and self._has_room(waiting[0], running):
                check = waiting.popleft()
                limit_s = min(self._patience * check.limit_s, self._deadline - time.monotonic())
                line = self._line_without_a_run(check, limit_s)
                if line is not None:
                    yield line
                    continue
                context = Context(self._device, limit_s, self._is_rehearsal)
                running.append(_Run(check, context, self._processes))
            # One thread waits for all: two that ask the fork server how a process ended may each
            # read a part of the answer.
            for run in _wait(running):
                running.remove(run)
                yield run.end()

    def run(self, check: Check) -> Line:
        """Run one check, and wait for its end or for its limit."""
        (line,) = self.run_all([check])
        return line

    def _has_room(self, check: Check, running: "Sequence[_Run]") -> bool:
        if check.is_alone or any(run.check.is_alone for run in running):
            return not running
        return len(running) < self._jobs

    def _line_without_a_run(self, check: Check, limit_s: float) -> Line | None:
        """Return the line of a check that is not started."""
        if check.needs_gpu and self._device == "cpu" and not self._is_rehearsal:
            findings = Findings(not_possible=check.needs_gpu, is_complete=True)
            return Line(check, "not possible here", 0.0, findings)
        if limit_s <= 0:
            problem = "expected time to run it, got none left. Run it with --only"
            return Line(check, "failed", 0.0, Findings(problems=[problem]))
        return None


class _Run:
    """A check that is running.

    Args:
        check: The check.
        context: What it is given.
        processes: How its process is started.
    """

    def __init__(self, check: Check, context: Context, processes: Any) -> None:
        self.check = check
        self._limit_s = context.limit_s
        self._folder = tempfile.TemporaryDirectory()
        self._start = time.monotonic()
        self.deadline = self._start + context.limit_s
        self.process = processes.Process(
            target=_run_check, args=(check.target, context, Path(self._folder.name))
        )
        self.process.start()

    def end(self) -> Line:
        """End what is left of it, and return its line."""
        is_late = self.process.is_alive()
        _kill_tree(self.process)
        folder = Path(self._folder.name)
        findings = read_findings(folder / "findings.json")
        if is_late:
            findings.problems.insert(0, f"expected an end within {self._limit_s:.0f} s, got none")
        elif not findings.is_complete:
            ending = _ending(self.process.exitcode)
            findings.problems.insert(0, f"expected an end, got a crash with {ending}")
        word: Word = "not possible here" if findings.not_possible else "passed"
        if findings.problems:
            word = "failed"
        output = ""
        if word == "failed" and (folder / "output").exists():
            printed = (folder / "output").read_text(errors="replace").splitlines()
            output = "\n".join(printed[-_OUTPUT_LINES:])
        self._folder.cleanup()
        return Line(self.check, word, time.monotonic() - self._start, findings, output)


def _wait(running: Sequence[_Run]) -> list[_Run]:
    """Wait for the first of several runs to end or to be late; return all that have or are."""
    if running:
        first_s = min(run.deadline for run in running) - time.monotonic()
        connection.wait([run.process.sentinel for run in running], max(0.0, first_s))
    now = time.monotonic()
    return [run for run in running if not run.process.is_alive() or run.deadline <= now]


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit status {exit_code}"


def _run_check(target: str, context: Context, folder: Path) -> None:
    """Run in the process of a check."""
    # A group of its own, by which its ranks can be ended with it.
    os.setsid()
    with open(folder / "output", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # closefd: ranks do the same, and what they drop must not close their own output.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    os.environ["MEGATRON_MUON_DEVICE"] = context.device
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = Report(folder / "findings.json")
    not_possible = ""
    try:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(context, report)
    except NotPossibleError as error:
        not_possible = str(error)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        report.expect(False, f"expected the package {error.name}, got none. Put it on PYTHONPATH")
    except BaseException as error:  # noqa: B036 - the line says what it was
        traceback.print_exc()
        report.expect(False, f"{type(error).__name__}: {str(error)[:600]}")
    report.finish(not_possible=not_possible)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's exit: threads of gloo and CUDA may hang there.
    os._exit(0)


def _kill_tree(process: Any) -> None:
    """End a process, its group, and descendants that have left its group, as torchrun's do."""
    for pid in _descendants(process.pid):
        with contextlib.suppress(OSError):  # it may have ended by now
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found
