# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plan reports made while other tests run, in the time that these leave idle.

Ranks of a test wait for each other, and leave a third of two cores idle. A plan takes up to half a
minute of one core. Their processes have the lowest priority: they slow nothing down.
"""

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from helpers.ranks import ROOT

_pool = ThreadPoolExecutor(1)


def start_plans(flags: Iterable[str]) -> None:
    """Start reports, one after the other."""
    for each in flags:
        _start(each)


def printed_plan(flags: str) -> str:
    """Return what ``python -m megatron_muon.plan`` prints, once it has."""
    return _start(flags).result()


def stop_plans() -> None:
    """Start no further report: nobody will ask for it."""
    _pool.shutdown(wait=False, cancel_futures=True)


@functools.cache
def _start(flags: str) -> "Future[str]":
    return _pool.submit(_print, flags)


def _print(flags: str) -> str:
    command = [sys.executable, "-m", "megatron_muon.plan", *shlex.split(flags)]
    done = subprocess.run(
        ["nice", "-n", "19", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
