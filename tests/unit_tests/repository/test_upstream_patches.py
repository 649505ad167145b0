# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs for pull requests. ``scripts/maintainer/upstream_patches.py`` runs them on a checkout."""

import ast
import re
from pathlib import Path

import pytest
from helpers.ranks import ROOT

UPSTREAM = ROOT / "patches" / "upstream"
FOLDERS = sorted(path.name for path in UPSTREAM.iterdir() if path.is_dir())


def test_readme_lists_each_repair():
    """A repair that was never run without and with its diff has no row in the README."""
    rows = re.findall(
        r"^\| `([\w-]+)` \| .*\d+ failed.* \| (\d+ passed) \|$",
        (UPSTREAM / "README.md").read_text(),
        re.M,
    )
    assert [name for name, _ in rows] == FOLDERS


@pytest.mark.parametrize("name", FOLDERS)
def test_repair_is_complete_and_names_upstream_alone(name: str):
    """A repair lacks a file, or refers to this package, which its readers do not have."""
    folder = UPSTREAM / name
    files = {path.relative_to(folder) for path in folder.rglob("*.*") if path.is_file()}
    (test,) = files - {Path("description.md"), Path("repair.patch")}
    assert test.parts[:2] == ("tests", "unit_tests") and test.name.startswith("test_")
    texts = [(folder / file).read_text() for file in sorted(files)]
    assert not any(re.search(r"megatron[-_]?muon", text, re.I) for text in texts)

    description, patch, source = texts
    title, blank, *lines = description.splitlines()
    assert title.startswith("# ") and not blank and len(lines) == 3 and all(lines)
    changed = re.findall(r"^\+\+\+ b/(.*)$", patch, re.M)
    assert changed and all(file.startswith("megatron/") for file in changed)
    tests = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert any(node.name.startswith("test_") and ast.get_docstring(node) for node in tests)
    assert len(source.splitlines()) < 50
