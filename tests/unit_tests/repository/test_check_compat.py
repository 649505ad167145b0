# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""scripts/check_compat.py: its table of versions, and one run without network."""

import sys

import compat_steps
import pytest
from helpers.commands import run_command
from helpers.ranks import ROOT
from packaging.version import Version

from megatron_muon.patching import versions


def test_source_tree_without_a_wheel_is_in_the_table_and_said_to_be_one():
    """The tag core_v0.19.0 calls itself 0.19.1: its users were warned. pip cannot install it."""
    later, row, *mains = (row for row in versions.TABLE if row.tree)
    assert later.emerging_optimizers == "0.4.0" and versions.is_tested(later.versions)
    assert row.megatron_core == "0.19.1"
    assert versions.is_tested(row.versions)
    for main in mains:
        assert main.commit and not versions.is_tested(main.versions)
    text = next(line for line in versions.table_text().splitlines() if "0.19.1" in line)
    assert "works (source tree, no wheel: Megatron-LM's tag core_v0.19.0)" in text
    assert row is not versions.TABLE[0], "the first row is what the errors say to install"
    page = (ROOT / "docs" / "support.md").read_text()
    assert "| 0.19.1 | 0.3.0 | 2.11.0 | works; Megatron-LM's tag `core_v0.19.0`" in page
    for main in mains:
        assert f"| 0.20.0 | 0.3.0 | {main.torch} | works at commit {main.commit}" in page


def test_document_has_the_rows_of_the_table():
    """And the workflow runs the oldest and the newest torch of it."""
    lines = (ROOT / "docs" / "support.md").read_text().splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")[:3]) for line in lines]
    rows = [tuple(row.versions.values()) for row in versions.TABLE]
    assert [each for each in cells if each in rows] == rows
    torches = sorted(Version(row.torch) for row in versions.TABLE)
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert f'torch: ["{torches[0]}", "{torches[-1]}"]' in workflow


def test_smoke_tests_are_there():
    """A file that moved would fail the step in every environment."""
    for name in (*compat_steps.SMOKE_TESTS, *compat_steps.FSDP_V2_TESTS):
        assert (ROOT / "tests" / "unit_tests" / f"{name}.py").is_file(), name


@pytest.mark.slow
def test_check_here_trains():
    """The command of docs/support.md, in the environment of the tests."""
    script = str(ROOT / "scripts" / "check_compat.py")
    done = run_command(sys.executable, script, "--here", "--steps", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("| as it is | ok | yes |")
