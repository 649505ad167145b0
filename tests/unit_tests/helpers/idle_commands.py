# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands that run while other tests do, in the time that these leave idle.

Ranks of a test wait for each other, and leave a third of two cores idle. Commands have the lowest
priority: they slow nothing down. None has a limit that a busy machine could exceed, and no test
looks at a time that one of them measures.

A test module that has such commands has a function ``idle_commands(name, params)``, which yields
those of the test of this name and parameters. ``conftest.py`` starts them when tests have been
collected, in the order of the tests, and runs these tests last.
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from helpers.ranks import ROOT

# In arguments, the folder that the command runs in.
FOLDER = "FOLDER"
_LIMIT_S = 1800  # against a hang alone

# As it is before tests: while a command starts, one may have changed PATH.
_ENVIRONMENT = dict(os.environ)

_pool = ThreadPoolExecutor(1)
_folders: list[tempfile.TemporaryDirectory[str]] = []
_running: list[subprocess.Popen[str]] = []


class IdleCommand(NamedTuple):
    """A command.

    Args:
        arguments: The program and its arguments; :data:`FOLDER` in one of them stands for the
            folder that it runs in.
        env: Environment variables to set, ``(name, value)``.
        files: What lies in its folder when it starts, ``(name, text)``.
    """

    arguments: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()


class Ended(NamedTuple):
    """What a command left behind, which ran in a folder of its own.

    Args:
        returncode: Its exit status.
        stdout: Standard output.
        stderr: Standard error.
        folder: Its folder.
    """

    returncode: int
    stdout: str
    stderr: str
    folder: Path


def torchrun_command(num_ranks: int, *arguments: str, **options: Any) -> IdleCommand:
    """Return the command that runs a script through the launcher on CPU ranks, as users do.

    Args:
        num_ranks: Ranks.
        *arguments: The script and its arguments.
        **options: Of :class:`IdleCommand`.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return IdleCommand(
        (*torchrun, "--nproc-per-node", str(num_ranks), "-m", "megatron_muon", *arguments),
        env=(("MEGATRON_MUON_DEVICE", "cpu"),),
        **options,
    )


def plan_command(flags: Iterable[str]) -> IdleCommand:
    """Return the command that prints a plan report."""
    return IdleCommand((sys.executable, "-m", "megatron_muon.plan", *flags))


def start(commands: Iterable[IdleCommand]) -> None:
    """Start commands, one after the other."""
    for each in commands:
        _start(each)


def ended(command: IdleCommand) -> Ended:
    """Return what a command has left behind, once it has ended."""
    return _start(command).result()


def stop() -> None:
    """End what nobody will ask for."""
    _pool.shutdown(wait=False, cancel_futures=True)
    for process in _running:
        # Terminated, not killed: a command then ends its ranks.
        process.terminate()
        process.wait()
    for folder in _folders:
        folder.cleanup()


@functools.cache
def _start(command: IdleCommand) -> "Future[Ended]":
    return _pool.submit(_run, command)


def _run(command: IdleCommand) -> Ended:
    paths = [str(ROOT), *filter(None, [_ENVIRONMENT.get("PYTHONPATH")])]
    _folders.append(tempfile.TemporaryDirectory())
    folder = _folders[-1].name
    for name, text in command.files:
        Path(folder, name).write_text(text)
    arguments = [each.replace(FOLDER, folder) for each in command.arguments]
    process = subprocess.Popen(
        ["nice", "-n", "19", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **_ENVIRONMENT,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **dict(command.env),
        },
    )
    _running.append(process)
    try:
        stdout, stderr = process.communicate(timeout=_LIMIT_S)
    finally:
        process.terminate()
        process.wait()
        _running.remove(process)
    return Ended(process.returncode, stdout, stderr, Path(folder))
