# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Tests of plain FSDP2 run in the environment of ``pip install .``, which has no megatron-core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = "test_step_faults.py::test_empty_gradient_may_have_another_empty_shape"


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_start_without_megatron(tmp_path):
    """The server of ranks imported megatron, and 119 of 188 tests failed."""
    # None is what Python documents for a module that shall not be found. Every process that the
    # tests start imports this file.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['megatron'] = None\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent / TEST)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:] + done.stderr
