# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands that tests run as users do."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.ranks import ROOT, launch

if TYPE_CHECKING:
    from launched_run import TrainingLog

_LIMIT_S = 1800  # against a hang alone


def run_command(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of the repository to its end."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        arguments,
        cwd=cwd,
        env={**os.environ, **own, **(env or {})},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )


def run_torchrun(
    num_ranks: int, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script and its arguments through the launcher, on CPU ranks."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    ranks = ("--nproc-per-node", str(num_ranks), str(ROOT / "scripts" / "cpu_ranks"))
    return run_command(*torchrun, *ranks, *arguments, env=env)


def train_forked(
    ranks: int,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    **_: Any,
) -> "TrainingLog":
    """Train as ``launched_run.train`` does, on forked ranks in place of torchrun's."""
    # Tests that run as scripts of their own have no scripts/ on their path.
    from launched_run import TrainingLog

    log = TrainingLog()
    for output in launch(ranks, arguments, env=environment).check().outputs:
        for line in output.splitlines():
            log.feed(line)
    return log
