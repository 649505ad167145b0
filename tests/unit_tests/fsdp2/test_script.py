# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The script that trains with plain FSDP2."""

import re
import runpy
import sys

import pytest
from helpers.ranks import ROOT, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SCRIPT = ROOT / "scripts" / "train_fsdp2.py"


def _run_script(*arguments: str) -> None:
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _losses(num_ranks: int, *arguments: str) -> dict[int, float]:
    output = run_ranks(num_ranks, _run_script, *arguments).check().outputs[0]
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"^step (\d+): loss (.*)$", output, re.M)
    }


def test_script_learns_and_goes_on_on_other_ranks(tmp_path):
    """The script learns, and goes on with the same losses on another number of ranks."""
    expected = _losses(2, "--steps", "16")
    assert list(expected) == list(range(1, 17))
    assert expected[16] < 0.5 * expected[1]
    folder = ("--checkpoint", str(tmp_path / "saved"))
    before = _losses(2, "--steps", "12", *folder)
    after = _losses(4, "--steps", "16", *folder)
    assert list(after) == [13, 14, 15, 16]
    assert before | after == pytest.approx(expected, rel=1e-3)
