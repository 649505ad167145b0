# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One check on all ranks together, and its line of the table."""

import sys
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch.distributed as dist

from megatron_muon.runtime.agreement import first_line, gather_objects, own_rank

# From the best to the worst.
_ORDER = ("PASS", "SKIP", "FAIL")


class Finding(NamedTuple):
    """Result of a check on one rank, or the worst one of all ranks.

    Args:
        verdict: ``SKIP`` where it cannot run here.
        text: Measured values, or the error and what to do.
    """

    verdict: Literal["PASS", "SKIP", "FAIL"]
    text: str


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
    is_first = own_rank() == 0
    if is_first:
        sys.stdout.write(f"{name} ... ")
        sys.stdout.flush()
    try:
        own = check()
    # Compilers and drivers raise errors of their own, and the other checks should still run.
    except Exception as error:
        own = Finding("FAIL", first_line(error))
    try:
        findings = gather_objects(own)
    except RuntimeError as error:
        raise LostRanksError(
            f"{name}: expected findings of {dist.get_world_size()} ranks, got an error on rank "
            f"{own_rank()}, which found {own.verdict}: {own.text}. A rank ended or hangs; look at "
            f"its output. {first_line(error)}"
        ) from error
    verdict, text = max(findings, key=lambda finding: _ORDER.index(finding.verdict))
    ranks = [str(rank) for rank, finding in enumerate(findings) if finding.verdict == verdict]
    if len(ranks) < len(findings):
        text = f"{text} (ranks {', '.join(ranks)})"
    if is_first:
        sys.stdout.write(f"{verdict}: {text}\n")
        sys.stdout.flush()
    return Finding(verdict, text)
