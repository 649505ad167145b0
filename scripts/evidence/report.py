# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The report of a folder, its tables and its pictures."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from evidence.machine import ROOT
from evidence.promises import PROMISES, judge
from evidence.records import NOT_TRIED, PASSED, Evidence, Record
from evidence.verdicts import FAILS, Verdict

sys.path.append(str(ROOT / "scripts" / "maintainer"))
from metrics_plot import draw

# Lines of a log that a report repeats: tables, findings of the check, head and end of a run.
_TOLD = re.compile(
    r"^\||\.\.\. (?:PASS|FAIL|SKIP)|^(?:PASS|FAIL) on|^rates: |^ranks \d|TFLOP/s"
    r"|^FAILED |^ERROR |^=+ .* in [\d.]+s|^\d+ \w+.* in [\d.]+s"
)
_LAST_LINES = 15


def judge_all(evidence: Evidence, folder: Path) -> list[Verdict]:
    """Return the verdicts of all promises, in their order."""
    return [judge(promise, evidence, folder) for promise in PROMISES]


def write(evidence: Evidence, folder: Path) -> bool:
    """Write ``report.md``, ``evidence.json`` and pictures; return whether nothing failed."""
    verdicts = judge_all(evidence, folder)
    found = [
        {
            "subject": promise.subject,
            "document": promise.document,
            "sentence": promise.sentence,
            **verdict._asdict(),
        }
        for promise, verdict in zip(PROMISES, verdicts, strict=True)
    ]
    evidence.store(folder, found)
    pictures = list(_write_pictures(evidence, folder))
    lines = [*_head(evidence), *_promises(verdicts), *_overview(evidence)]
    for name in pictures:
        lines += [f"![Losses under DDP and Megatron-FSDP]({name})", ""]
    lines += tables(evidence, folder, heading="##")
    (folder / "report.md").write_text("\n".join(lines))
    pairs = zip(PROMISES, verdicts, strict=True)
    broken = [p for p, verdict in pairs if verdict.verdict == FAILS and not p.is_fact]
    ran = {record.verdict for record in evidence.records.values()}
    return not broken and ran <= {PASSED, NOT_TRIED}


def _head(evidence: Evidence) -> Iterator[str]:
    machine = evidence.machine
    yield from (f"# Evidence: {machine.title}", "")
    if not machine.gpus:
        yield "These are CPU ranks with tiny models: the figures tell nothing about a GPU."
        yield ""
    yield from (*_facts(evidence), "", "Commands:", "")
    yield from (*(f"    {call}" for call in evidence.calls), "")


def _facts(evidence: Evidence) -> Iterator[str]:
    machine = evidence.machine
    dates = sorted(record.began_at[:10] for record in evidence.records.values() if record.began_at)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "no piece has run"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    driver = f", driver {machine.driver}" if machine.driver else ""
    yield f"{days}; {machine.title}{driver}; {versions}; commit {machine.commit}."


def _promises(verdicts: Sequence[Verdict]) -> Iterator[str]:
    counts = Counter(verdict.verdict for verdict in verdicts)
    yield f"## Promises: {', '.join(f'{count} {name}' for name, count in counts.items())}"
    yield ""
    yield "| of | verdict | found | promise |"
    yield "| --- | --- | --- | --- |"
    for promise, verdict in zip(PROMISES, verdicts, strict=True):
        place = f"{promise.document}: {promise.sentence}"
        cells = [promise.subject, f"**{verdict.verdict}**", verdict.reason, place]
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""


def _overview(evidence: Evidence) -> Iterator[str]:
    yield from ("## Pieces", "", "| piece | verdict | seconds |", "| --- | --- | ---: |")
    for name, record in evidence.records.items():
        detail = f": {record.detail}" if record.detail else ""
        yield f"| {name} | {record.verdict}{_cell(detail)} | {record.seconds:.0f} |"
    yield ""


def tables(evidence: Evidence, folder: Path, heading: str) -> Iterator[str]:
    """Yield the lines of each piece that ran: its command, and what it told.

    Args:
        evidence: Of the folder.
        folder: With the logs.
        heading: Marks of a heading of a piece.
    """
    for name, record in evidence.records.items():
        if record.verdict == NOT_TRIED:
            continue
        yield from (f"{heading} {name}: {record.verdict}", "", f"    {record.command}", "")
        log = folder / f"{name}.log"
        text = log.read_text(errors="replace") if log.is_file() else ""
        yield from _told(record, text.splitlines())


def _told(record: Record, log: Sequence[str]) -> Iterator[str]:
    told = [line for line in log if _TOLD.search(line)]
    for is_table, lines in groupby(told, key=lambda line: line.startswith("|")):
        fence = [] if is_table else ["```"]
        yield from (*fence, *lines, *fence, "")
    if record.verdict != PASSED:
        yield from ("Last lines:", "", "```", *log[-_LAST_LINES:], "```", "")


def tables_of_folders(folders: Sequence[Path]) -> str:
    """Return the tables of folders as Markdown, each below the card and the versions."""
    lines: list[str] = []
    for folder in folders:
        evidence = Evidence.load(folder)
        lines += [f"### {evidence.machine.title}", "", *_facts(evidence), ""]
        lines += [*_promises(judge_all(evidence, folder))][2:]
        lines += tables(evidence, folder, heading="####")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return a text that does not end a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _write_pictures(evidence: Evidence, folder: Path) -> Iterator[str]:
    for name in ("parity", "parity_1000"):
        record = evidence.records.get(name)
        data: Any = record.data if record else None
        cases = {
            case: row["losses"]
            for case, row in (data or {}).get("cases", {}).items()
            if "losses" in row
        }
        if cases:
            runs = {"DDP": "ddp", "Megatron-FSDP": "fsdp"}
            curves = {
                title: {case: [*enumerate(losses[run], 1)] for case, losses in cases.items()}
                for title, run in runs.items()
            }
            (folder / f"{name}.svg").write_text(draw(curves))
            yield f"{name}.svg"
