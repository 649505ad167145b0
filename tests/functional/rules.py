# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What makes a run pass: Megatron's comparison with golden values, and a sharper one of ours.

Megatron compares exactly, to five decimals, or within 5 % at all but 1 % of the steps. Equality
holds on the kind of CPU that recorded the values: another kind may round an intermediate result
otherwise, and now and then the last of five decimals changes.

A golden loss of upstream's Muon cases falls by less than 5 % in its 100 steps, so a run that never
learns passes the second rule. Ours therefore compares each iteration with the same training without
sharding, under DDP with upstream's own Muon, within what rounding explains.

Source: thresholds and rules are those of Megatron-LM's
``tests/functional_tests/python_test_utils`` (``test_pretraining_regular_pipeline.py``,
``common.py``).
"""

import math
import statistics
from dataclasses import dataclass

from metrics import Values, rounded

# Metrics that Megatron compares exactly where results are deterministic.
EXACT_METRICS = ("lm loss", "mtp_1 loss", "num-zeros")
RELATIVE_TOLERANCE = 0.05
# Between a sharded run and DDP, by precision: those of test_parity.py (docs/numerics.md).
UNSHARDED_TOLERANCES = {"high": 5e-7, "medium": 1e-5, "bf16": 1.5e-4}
# Float32 keeps a loss to about 6e-8 of itself.
EVENT_ROUNDING = 6e-8


@dataclass(frozen=True)
class Verdict:
    """What one rule says of one metric."""

    rule: str
    metric: str
    passed: bool
    detail: str


def compare_with_golden(
    metric: str,
    found: Values,
    golden: Values,
    *,
    exactly: bool,
    recorded_on: str | None = None,
    here: str | None = None,
) -> list[Verdict]:
    """Compare a metric with golden values by Megatron's rules.

    Args:
        metric: Name of the scalar.
        found: This run's values.
        golden: Values that were recorded; their steps are the ones compared.
        exactly: Whether losses and counts have to be equal to five decimals.
        recorded_on: Kind of CPU that recorded the golden values; None where it does not matter.
        here: Kind of CPU of this run. Another kind leaves the exact comparison out, and says so.

    Returns:
        A verdict for each rule that applies.
    """
    steps = sorted(golden)
    if metric == "iteration-time":
        return [_compare_time(found, golden)]
    ours, theirs = rounded(found, steps), [golden[i] for i in steps]
    verdicts = []
    if exactly and metric in EXACT_METRICS and recorded_on not in (None, here):
        detail = f"not compared: recorded on {recorded_on}, this is {here}"
        verdicts.append(Verdict("exact", metric, True, detail))
    elif exactly and metric in EXACT_METRICS:
        unequal = [i for i, a, b in zip(steps, ours, theirs, strict=True) if a != b]
        detail = f"unequal at {len(unequal)} of {len(steps)} steps: {unequal}"
        verdicts.append(Verdict("exact", metric, not unequal, detail))
    num_far = sum(not _is_close(a, b) for a, b in zip(ours, theirs, strict=True))
    allowed = min(max(len(steps) // 100, 1), 50) if len(steps) > 1 else 0
    detail = f"{num_far} of {len(steps)} steps beyond 5 %, {allowed} allowed"
    return [*verdicts, Verdict("approximate", metric, num_far <= allowed, detail)]


def compare_with_unsharded(
    found: Values, unsharded: Values, train_iters: int, tolerance: float
) -> Verdict:
    """Compare the loss of every iteration with that of the same training without sharding."""
    steps = range(1, train_iters + 1)
    missing = [i for i in steps if i not in found or i not in unsharded]
    if missing:
        return Verdict("unsharded", "lm loss", False, f"no loss at steps {missing}")
    differences = {i: abs(found[i] - unsharded[i]) / abs(unsharded[i]) for i in steps}
    worst = max(steps, key=lambda i: (differences[i] != differences[i], differences[i]))
    limit = tolerance + EVENT_ROUNDING
    detail = f"at most {differences[worst]:.1e} of the loss apart (step {worst}), limit {limit:.1e}"
    return Verdict("unsharded", "lm loss", differences[worst] <= limit, detail)


def unsharded_tolerance(arguments: dict[str, str]) -> float:
    """Choose the tolerance that docs/numerics.md gives for a precision, by its flags."""
    if "--bf16" in arguments:
        return UNSHARDED_TOLERANCES["bf16"]
    return UNSHARDED_TOLERANCES[arguments.get("--muon-fp32-matmul-prec", "medium")]


def _compare_time(found: Values, golden: Values) -> Verdict:
    """Compare the medians over the steps that Megatron takes for the steady ones."""
    window = range(5, 21) if max(golden, default=0) <= 25 else range(30, 46)
    steps = [i for i in window if i in golden]
    ours = statistics.median(rounded(found, steps) or [math.inf])
    theirs = statistics.median([golden[i] for i in steps] or [math.inf])
    detail = f"median {ours:.4f} s, golden {theirs:.4f} s"
    return Verdict("approximate", "iteration-time", steps != [] and _is_close(ours, theirs), detail)


def _is_close(found: float, golden: float) -> bool:
    if found == golden:
        return True
    return abs(found - golden) <= RELATIVE_TOLERANCE * abs(golden) < float("inf")
