# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The table of refused settings in docs/support.md is that of the code."""

import runpy
from pathlib import Path

ROOT = next(path for path in Path(__file__).resolve().parents if (path / "pyproject.toml").exists())


def _rows_below(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its header and backticks."""
    lines = text.partition(f"\n{heading}\n")[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def test_refused_settings_of_the_document_are_those_of_the_code():
    """A setting that is refused without being documented, or with another reason, is found here."""
    # By path: the module imports no megatron, its package does.
    code = runpy.run_path(str(ROOT / "megatron_muon" / "mcore" / "unsupported.py"))
    expected = [[row.flag, row.reason, row.instead] for row in code["UNSUPPORTED"]]
    found = _rows_below((ROOT / "docs" / "support.md").read_text(), "## Refused")
    assert found == expected, "docs/support.md, Refused: expected the rows " + "\n".join(
        "| " + " | ".join(row) + " |" for row in expected if row not in found
    )
