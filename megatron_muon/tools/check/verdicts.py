# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One check on all ranks together, and its line of the table."""

import sys
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch.distributed as dist

from megatron_muon.runtime.agreement import first_line, gather_objects, own_rank

Verdict = Literal["PASS", "SKIP", "SLOW", "FAIL"]
# From the best to the worst.
_ORDER: tuple[Verdict, ...] = ("PASS", "SKIP", "SLOW", "FAIL")


class Finding(NamedTuple):
    """Result of a check on one rank, or the worst one of all ranks.

    Args:
        verdict: ``SKIP`` where a requirement is missing that a run may not need.
        result: Measured values, or the error.
        advice: Sentence that says what to do; empty where nothing is to be done.
    """

    verdict: Verdict
    result: str
    advice: str = ""


class LostRanksError(RuntimeError):
    """A rank left a check, or ended, while the others waited for it."""


def on_all_ranks(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check on all ranks, and print the worst of their findings on rank 0.

    Args:
        name: Name of the check.
        check: Joined by all ranks; may communicate. An exception is a ``FAIL`` of its rank.

    Raises:
        LostRanksError: A rank ended, or did not join within the timeout of the process group.

    Communication: a gather of objects over the job.
    """
    if own_rank() == 0:
        sys.stdout.write(f"{name} ... ")
        sys.stdout.flush()
    try:
        own = check()
    # Compilers and drivers raise errors of their own, and the other checks should still run.
    except Exception as error:
        own = Finding("FAIL", first_line(error), "Report it")
    try:
        findings = gather_objects(own)
    except RuntimeError as error:
        raise LostRanksError(
            f"{name}: expected findings of {dist.get_world_size()} ranks, got an error on rank "
            f"{own_rank()}, which found {own.verdict}: {own.result}. A rank ended or hangs; look "
            f"at its output. {first_line(error)}"
        ) from error
    worst = max(findings, key=lambda finding: _ORDER.index(finding.verdict))
    ranks = [rank for rank, finding in enumerate(findings) if finding.verdict == worst.verdict]
    if len(ranks) < len(findings):
        worst = worst._replace(result=f"{worst.result} (ranks {', '.join(map(str, ranks))})")
    if own_rank() == 0:
        advice = f" -> {worst.advice}" if worst.advice else ""
        sys.stdout.write(f"{worst.verdict}: {worst.result}{advice}\n")
        sys.stdout.flush()
    return worst
