# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Lines and figures as markdown and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gpu_checks.catalogue import Check
from gpu_checks.report import Findings

Word = Literal["passed", "failed", "not possible here"]
# Of one line; all are among the raw numbers.
_MAX_PROBLEMS = 6


@dataclass(frozen=True)
class Line:
    """The outcome of one check.

    Args:
        check: The check.
        word: ``passed``, ``failed`` or ``not possible here``.
        seconds: How long it took.
        findings: What it found.
        output: The end of what its processes printed, where it failed.
    """

    check: Check
    word: Word
    seconds: float
    findings: Findings
    output: str = ""

    @property
    def text(self) -> str:
        """Reasons, then figures, then what was left out."""
        found = self.findings
        problems = found.problems[:_MAX_PROBLEMS]
        if len(found.problems) > len(problems):
            problems.append(f"and {len(found.problems) - len(problems)} more")
        parts = [found.not_possible, *problems, *found.figures]
        parts += [f"not possible here: {part}" for part in found.left_out]
        return "; ".join(part for part in parts if part)

    @property
    def markdown(self) -> str:
        """A row of the table."""
        name = f"{self.check.number} {self.check.name}"
        cells = (name, self.check.question, self.word, self.text, f"{self.seconds:.0f}")
        return f"| {' | '.join(map(_cell, cells))} |"


HEADS = ("check", "question", "", "figures", "s")


def table_head(heads: Sequence[str]) -> str:
    """Return the first two lines of a markdown table."""
    return f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}"


def document(title: str, machine: Mapping[str, str], command: str, lines: Sequence[Line]) -> str:
    """Lay out all lines as a document, with the tables of figures below.

    Args:
        title: Its heading.
        machine: Card, driver and versions, by name.
        command: What was run.
        lines: In the order of the list of checks.
    """
    parts = [f"# {title}", f"    {command}", table_head(("", ""))]
    parts[-1] += "".join(f"\n| {_cell(key)} | {_cell(value)} |" for key, value in machine.items())
    parts.append("\n".join([table_head(HEADS), *(line.markdown for line in lines)]))
    for line in lines:
        for name, heads, rows in line.findings.tables:
            parts.append(f"## {name}")
            body = (f"| {' | '.join(map(_cell, row))} |" for row in rows)
            parts.append("\n".join([table_head(heads), *body]))
    return "\n\n".join(parts) + "\n"


def write(
    folder: Path, title: str, machine: Mapping[str, str], command: str, lines: Sequence[Line]
) -> None:
    """Write the document and the raw numbers: ``gpu_checks.md`` and ``gpu_checks.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_checks.md").write_text(document(title, machine, command, lines))
    data = {"command": command, "machine": dict(machine), "checks": [asdict(x) for x in lines]}
    (folder / "gpu_checks.json").write_text(json.dumps(data, indent=1) + "\n")


def _cell(text: str) -> str:
    """Keep a text on one line of one cell, in ASCII."""
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat.encode("ascii", "replace").decode()
