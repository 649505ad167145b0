# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The functional runner on ranks forked from one process, which start in a second.

A process of its own, because the CPU cases pin the instructions that torch and its libraries may
use by variables that are read once.
Prints one JSON line a case, or a way to break the optimizer:
``[name, [[rule, metric, passed, detail], ...]]``.
"""

import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / name) for name in ("scripts", "tests/unit_tests")]

from cases import select_cases  # noqa: E402
from rules import Verdict  # noqa: E402

BROKEN = ("do_nothing", "skip_newton_schulz", "update_only_rank_0")
BROKEN_CASE = "gpt3_mcore_tp1_zp_z1_muon"


def forked_train(
    ranks: int,
    arguments: Sequence[str],
    *,
    script: Path,
    on_cpu: bool,
    environment: Mapping[str, str],
    before: Callable[[], None] | None = None,
) -> None:
    """Train on forked ranks, see ``launched_run.train``; ``before`` breaks sharded runs only."""
    from helpers.ranks import launch

    before = before if "--use-megatron-fsdp" in arguments else None
    # The limit is against a hang alone.
    launch(ranks, arguments, script=script, env=environment, before=before, timeout_s=900.0).check()


def main() -> None:
    """Run every CPU case, then one of them with broken optimizers; print what each rule says."""
    cases = select_cases([], "cpu")
    for case in cases:
        os.environ.update(case.environment)  # before torch is imported, which reads them
    from helpers import broken_optimizers, ranks
    from run import PRETRAIN_GPT, Runner

    # Once here rather than in every rank.
    ranks._context().set_forkserver_preload(["helpers.preloaded", "torch.utils.tensorboard"])
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), PRETRAIN_GPT, exactly=True, train=forked_train)
        for case in cases:
            _print(case.name, runner.run(case))
        for name in BROKEN:
            train = functools.partial(forked_train, before=getattr(broken_optimizers, name))
            broken = Runner(Path(folder) / name, PRETRAIN_GPT, exactly=True, train=train)
            broken.unsharded_losses = runner.unsharded_losses
            _print(name, broken.run(*select_cases([BROKEN_CASE], "cpu")))


def _print(name: str, verdicts: Iterable[Verdict]) -> None:
    print(json.dumps([name, [dataclasses.astuple(verdict) for verdict in verdicts]]), flush=True)


if __name__ == "__main__":
    main()
