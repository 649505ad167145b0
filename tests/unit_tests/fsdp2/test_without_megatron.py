# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Tests of plain FSDP2 run in the environment of ``pip install .``, which has no megatron-core."""

import os
import subprocess
import sys

import pytest

RUN = """
import importlib.util
from helpers.ranks import run_ranks
assert run_ranks(2, importlib.util.find_spec, "megatron").check().results == [None, None]
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_start_without_megatron(tmp_path):
    """Ranks start where megatron is not installed."""
    # None is what Python documents for a module that shall not be found. Every process that the
    # tests start imports this file.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['megatron'] = None\n")
    paths = [str(tmp_path), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run([sys.executable, "-c", RUN], env=env, check=True, timeout=120)
