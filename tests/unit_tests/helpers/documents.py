# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The documents, and the commands in them.

A command is a line of a code block (indented or fenced) that starts with ``bash``, ``torchrun``,
``python`` or either of them in ``.venv/bin``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from helpers.ranks import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "patches" / "README.md",
    ROOT / "tests" / "functional" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
GPU_ONLY = "# GPU only"


class Command(NamedTuple):
    """A command of a document.

    Args:
        where: File and line.
        text: The command on one line, without its comment.
        shown: Lines that the document shows as its output.
        is_gpu_only: Whether it is marked so.
    """

    where: str
    text: str
    shown: tuple[str, ...]
    is_gpu_only: bool


def code_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and content of each line in a code block; an empty line between blocks."""
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
            yield number, ""
        elif is_fenced:
            yield number, line
        else:
            yield number, line[4:] if line.startswith("    ") else ""


def is_command(line: str) -> bool:
    """Tell whether a line of a code block starts a command, environment variables before it."""
    pattern = r"(\$ )?([A-Z_]+=\S+ )*(bash|torchrun|python3?|\.venv/bin/(python|torchrun)) "
    return re.match(pattern, line) is not None


def commands_of(path: Path) -> list[Command]:
    """List the commands of a document."""
    found: list[Command] = []
    above, is_continued, shows = "", False, False
    for number, line in code_lines(path.read_text()):
        if is_continued:
            last = found[-1]
            found[-1] = last._replace(text=f"{last.text} {line.strip()}")
        elif is_command(line):
            where = f"{path.relative_to(ROOT)}:{number}"
            found.append(Command(where, line.strip(), (), above.strip() == GPU_ONLY))
            shows = True
        elif shows and line.strip() and not line.startswith("#"):
            found[-1] = found[-1]._replace(shown=(*found[-1].shown, line.strip()))
        else:
            shows = False
        is_continued = shows and not found[-1].shown and found[-1].text.endswith("\\")
        if is_continued:
            found[-1] = found[-1]._replace(text=found[-1].text.removesuffix("\\").strip())
        above = line
    return [
        each._replace(text=re.split(r"\s+#\s", each.text)[0].removeprefix("$ ")) for each in found
    ]
