# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions that judge a promise from the results of a piece."""

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from evidence.machine import Machine
from evidence.records import PASSED, Record

HOLDS, FAILS = "holds", "fails"
# docs/performance.md, below the table of FSDP2.
_MAX_UPDATE_ERROR = 0.04
# Of the row of Llama-3-8B in docs/performance.md.
_MOST_LAUNCHES = 30
_WHOLE_PARAMETERS = "all_gather", "layer_wise"
# Rates decide how plans spread matrices. Half of one is another plan.
_MIN_OF_ASSUMED = 0.5


class Verdict(NamedTuple):
    """Verdict of a promise.

    Args:
        verdict: ``HOLDS``, ``FAILS`` or ``NOT_TRIED``.
        reason: What was found, or why nothing was.
    """

    verdict: str
    reason: str


class NothingFoundError(ValueError):
    """The results of a piece do not tell."""


class Results(NamedTuple):
    """Results of the piece that a promise is judged from.

    Args:
        machine: Of the run.
        record: Of the piece, which ran.
        log: Its output.
    """

    machine: Machine
    record: Record
    log: str

    def data(self, *keys: str) -> Any:
        """Return a value of the JSON.

        Raises:
            NothingFoundError: It is not there.
        """
        value = self.record.data
        for key in keys:
            if not isinstance(value, Mapping) or value.get(key) is None:
                raise NothingFoundError(f"it wrote no {' '.join(keys)}")
            value = value[key]
        return value


def _verdict(holds: bool, reason: str) -> Verdict:
    return Verdict(HOLDS if holds else FAILS, reason)


def _found(pattern: str, results: Results) -> re.Match[str]:
    match = re.search(pattern, results.log, re.MULTILINE)
    if match is None:
        raise NothingFoundError("it printed no such line")
    return match


def bits(results: Results) -> Verdict:
    """The check found equal bits on several ranks."""
    if results.machine.ranks == 1:
        raise NothingFoundError("one rank shards nothing; tests_optimizer runs several on a card")
    text = _found(r"^step of Muon, fp32 messages \.\.\. \w+: (.*)$", results)[1]
    return _verdict(text == "equal bits", text)


def tests(results: Results) -> Verdict:
    """Tests of a piece passed, none failed."""
    summary = _found(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s", results)[1]
    cut = "; some had no time" if "no time is left in this piece" in results.log else ""
    return _verdict(results.record.verdict == PASSED and "passed" in summary, summary + cut)


def losses(results: Results) -> Verdict:
    """Losses stay beside DDP's in all cases that ran."""
    rows = results.data("cases")
    ran = {name: row for name, row in rows.items() if "holds" in row}
    wrong = [name for name, row in rows.items() if "error" in row or row.get("holds") is False]
    if not ran and not wrong:
        raise NothingFoundError("no case ran")
    texts = [
        f"{name} {row['relative']:.1e} of {row['tolerance']['rtol']:.1e} allowed in "
        f"{row['iterations']} iterations"
        for name, row in ran.items()
    ]
    texts += [f"{name}: an error" for name, row in rows.items() if "error" in row]
    return _verdict(not wrong, "; ".join(texts))


def overlap(results: Results) -> Verdict:
    """Most of the time of messages is hidden under computation."""
    share = results.data("optimizers", "owner", "mean", "hidden_share")
    # The first gather and the last scatter always are in sight: two of four messages where a rank
    # has two buckets.
    return _verdict(share >= 0.5, f"{share:.0%} of the time of messages is hidden, mean of ranks")


def sent_bytes(results: Results) -> Verdict:
    """Steps send the bytes of their plans, in every layout."""
    if results.machine.ranks == 1:
        raise NothingFoundError("one rank sends nothing")
    pairs = {}
    for layout, rows in results.data("layouts").items():
        for name, row in rows.items():
            if "plan_bytes" in row:
                # All-reduces carry norms, flags and Gram matrices of split matrices.
                kinds = row["bytes_by_collective"].items()
                sent = sum(count for kind, count in kinds if kind != "allreduce")
                pairs[f"{layout}, {name}"] = (sent, row["plan_bytes"])
    if not pairs:
        raise NothingFoundError("it compared no step with its plan")
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    texts = [f"{name}: {sent:,} sent, {plan:,} planned" for name, (sent, plan) in wrong.items()]
    return _verdict(not wrong, "; ".join(texts) or f"equal in {len(pairs)} steps")


def states(results: Results) -> Verdict:
    """Muon's state has half the bytes of AdamW's."""
    rows = results.data("layouts", "even")
    ours, adamw = (sum(rows[name]["kept_bytes"]) for name in ("megatron_muon", "AdamW"))
    ratio = ours / adamw
    # Beside the states, numbers of steps and of groups.
    return _verdict(0.45 < ratio < 0.55, f"{ours:,} bytes, {ratio:.2f} of AdamW's")


def updates(results: Results) -> Verdict:
    """First updates agree with those of fp32 messages."""
    errors = {
        f"{name}, {layout}": row["update_error"]
        for layout, rows in results.data("layouts").items()
        for name, row in rows.items()
        # dion scales wide matrices otherwise; the documented comparison has no tiny ones.
        if "update_error" in row and name != "dion" and layout != "tiny"
    }
    worst = max(errors, key=lambda name: errors[name])
    text = f"at most {errors[worst]:.3f} of the norm ({worst})"
    return _verdict(errors[worst] <= _MAX_UPDATE_ERROR, text)


def _times(results: Results, peer: str) -> dict[str, float]:
    layouts = results.data("layouts")
    ratios = {
        layout: rows[peer]["over_ours"]
        for layout, rows in layouts.items()
        if "over_ours" in rows.get(peer, {})
    }
    if not ratios:
        reasons = {rows[peer].get("error") for rows in layouts.values() if peer in rows}
        raise NothingFoundError(f"{peer}: {', '.join(sorted(filter(None, reasons))) or 'no row'}")
    return ratios


def beside(peer: str, *, is_faster: bool) -> Callable[[Results], Verdict]:
    """Compare times of a step with a peer's, of which documents tell whether it is faster."""

    def judge(results: Results) -> Verdict:
        ratios = _times(results, peer)
        text = ", ".join(f"{layout} {ratio:.2f}" for layout, ratio in ratios.items())
        holds = min(ratios.values()) < 1 if is_faster else min(ratios.values()) > 1
        return _verdict(holds, f"its step takes, of ours: {text}")

    return judge


def layer_wise(results: Results) -> Verdict:
    """A step is shorter than upstream's of whole parameters."""
    ratios = {name: results.data("peers", name, "over_owner") for name in _WHOLE_PARAMETERS}
    text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return _verdict(min(ratios.values()) > 1, f"a step takes, of ours: {text}")


def memory(results: Results) -> Verdict:
    """No step needs more memory than it reserved."""
    rows = results.data("rows")
    texts = [
        f"{row['optimizer']}: {row['peak_bytes']:,} of {row['planned_bytes']:,} bytes"
        for row in rows
    ]
    return _verdict(all(row["holds"] for row in rows), "; ".join(texts))


def rates(results: Results) -> Verdict:
    """The machine has the rates that plans assume."""
    products = _found(r"TFLOP/s by side .*: ([\d.e+]+); plans assume ([\d.e+]+) for (\d+)", results)
    texts = [f"{float(products[1]):g} TFLOP/s of {products[2]} for sides of {products[3]}"]
    shares = [float(products[1]) / float(products[2])]
    for name, rate, assumed in re.findall(r"(gbps\w*) ([\d.e+]+), plans assume (\S+)", results.log):
        texts.append(f"{name} {rate} of {assumed}")
        shares.append(float(rate) / float(assumed))
    return _verdict(min(shares) >= _MIN_OF_ASSUMED, "; ".join(texts))


def launches(results: Results) -> Verdict:
    """A step of a large job has no more launches than documented."""
    row = results.data("llama3-8b-64")
    launches = row["own_launches"] + row["engine_launches"]
    return _verdict(launches <= _MOST_LAUNCHES, f"{launches}, documented are {_MOST_LAUNCHES}")


def killed_rank(results: Results) -> Verdict:
    """No rank outlived a killed one, and torchrun named its signal."""
    if results.machine.ranks_on_node == 1:
        raise NothingFoundError("one rank has no others")
    row = results.data("cases", "step")
    if "error" in row:
        return Verdict(FAILS, row["error"].splitlines()[0])
    if not row["others_ended"]:
        return Verdict(FAILS, "ranks were left")
    message = textwrap.shorten(row["message"], 120, placeholder=" ...")
    text = f"all ended after {row['seconds_until_all_ended']:.1f} s: {message}"
    return _verdict(bool(row["message"]), text)


def restart(results: Results) -> Verdict:
    """A run that a killed rank ended went on from its last save with the same losses."""
    row = results.data("cases", "restart")
    text = f"resumed after iteration {row['resumed_at']}, losses differ by"
    text += f" {row['largest_difference']:.1e}"
    if row["holds"] and not row["equal"]:
        # Backward passes on a GPU may add in any order, without a restart too.
        raise NothingFoundError(f"{text}, within the rounding of bf16")
    return _verdict(row["holds"], text)


def killed_save(results: Results) -> Verdict:
    """All runs that were killed in a save went on as if they had not been."""
    rows = re.findall(r"^\|.*killed in save.*\| (.*) \|$", results.log, re.MULTILINE)
    if not rows:
        raise NothingFoundError("no rank was killed in a save")
    equal = rows.count("equal")
    return _verdict(equal == len(rows), f"{equal} of {len(rows)} resumed equal")


def unmeasured(results: Results) -> Verdict:
    """Judge nothing: no piece measures it."""
    raise NothingFoundError("no piece measures it")
