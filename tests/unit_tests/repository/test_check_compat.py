# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""scripts/check_compat.py: its list of tests, and one run without network."""

import sys

import compat_steps
import pytest
from helpers.commands import run_command
from helpers.ranks import ROOT


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
