# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Recipes of trainers: those whose library is installed train, and resume with equal losses.

docs/trainers.md says how to make an environment with all the libraries.
"""

import importlib.metadata
import os
import sys

import pytest
from helpers.commands import run_command
from helpers.ranks import ROOT

# Script, libraries and arguments.
RECIPES = [
    ("with_accelerate", "accelerate", ()),
    ("with_trainer", "transformers accelerate", ()),
    (
        "with_trainer",
        "transformers accelerate",
        ("--form", "class", "--state-dict-type", "FULL_STATE_DICT"),
    ),
    ("with_trainer", "transformers accelerate", ("--form", "parameters")),
    ("with_trainer", "trl", ("--trainer", "trl", "--form", "parameters")),
    ("with_trainer", "axolotl", ("--trainer", "axolotl")),
    ("with_trainer", "ms-swift", ("--trainer", "ms-swift")),
    ("with_builder", "verl", ("--trainer", "verl")),
    ("with_builder", "nemo-automodel", ("--trainer", "automodel")),
    ("with_builder", "hydra-core", ("--trainer", "nemo-rl")),
    ("with_builder", "torchtitan", ("--trainer", "torchtitan")),
    ("with_lightning", "lightning", ()),
    ("with_megatron_fsdp", "megatron-fsdp", ()),
    ("with_peft", "peft", ()),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.cpu_only
@pytest.mark.parametrize(("script", "packages", "arguments"), RECIPES)
def test_recipe_trains_and_resumes(script, packages, arguments, tmp_path):
    """Each recipe of an installed trainer trains, and resumes with equal losses."""
    for package in packages.split():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    optimizer = os.environ.get("MEGATRON_MUON_TEST_RECIPES", "muon")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(ROOT / f"scripts/recipes/{script}.py")]
    folder = str(tmp_path / "saved")
    done = run_command(*command, "--optimizer", optimizer, "--folder", folder, *arguments)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "losses after loading: equal" in done.stdout
