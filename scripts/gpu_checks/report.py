# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a check finds out, on disk after each entry: a crash or a hang leaves what came before."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Device = Literal["cuda", "cpu"]


class NotPossibleError(Exception):
    """Nothing of the check can run here; the text says why."""


@dataclass(frozen=True)
class Context:
    """Where a check runs.

    Args:
        device: Of all tensors.
        limit_s: Seconds after which the check is ended.
        is_rehearsal: Whether a check that needs a GPU runs on the CPU, with tiny sizes: its code
            runs, its figures mean nothing.
    """

    device: Device
    limit_s: float
    is_rehearsal: bool = False


@dataclass
class Findings:
    """What was found so far.

    Args:
        figures: In the words of the line.
        problems: A sentence each; the check has failed if there is one.
        left_out: Parts that are not possible here, and why.
        not_possible: Why nothing could run; empty where something did.
        tables: Title, heads and rows of figures.
        data: Raw numbers.
        is_complete: Whether the check came to its end.
    """

    figures: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    not_possible: str = ""
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


class Report:
    """Collect findings, and write each to a file at once.

    Args:
        path: JSON file, written anew with each entry.
    """

    def __init__(self, path: Path) -> None:
        self.findings = Findings()
        self._path = path
        self._write()

    def figure(self, text: str) -> None:
        """Add a figure to the line of the check."""
        self.findings.figures.append(text)
        self._write()

    def expect(self, is_right: bool, problem: str) -> None:
        """Fail the check with a sentence where something is not right, and go on."""
        if not is_right:
            self.findings.problems.append(problem)
            self._write()

    def leave_out(self, part: str, reason: str) -> None:
        """Say which part of the check is not possible here."""
        self.findings.left_out.append(f"{part}: {reason}")
        self._write()

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show rows of figures below the lines; of one title, the last are shown."""
        kept = [table for table in self.findings.tables if table[0] != title]
        self.findings.tables = [*kept, (title, list(heads), [list(map(str, r)) for r in rows])]
        self._write()

    def data(self, name: str, value: Any) -> None:
        """Keep a raw number, or any other JSON value."""
        self.findings.data[name] = value
        self._write()

    def finish(self, *, not_possible: str = "") -> None:
        """Mark that the check came to its end."""
        self.findings.not_possible = not_possible
        self.findings.is_complete = True
        self._write()

    def _write(self) -> None:
        # A new file, then renamed: whoever reads after a kill finds a whole one.
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self.findings)))
        written.replace(self._path)


def read_findings(path: Path) -> Findings:
    """Read what a check has left; nothing if it never started."""
    return Findings(**json.loads(path.read_text())) if path.exists() else Findings()
