# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Recipes of trainers: those whose library is installed train, and resume with equal losses."""

import importlib.metadata
import sys
from pathlib import Path

import check_recipes
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.cpu_only]


@pytest.mark.parametrize("recipe", check_recipes.RECIPES, ids=lambda recipe: recipe.script)
def test_recipe_trains_and_resumes(recipe, tmp_path):
    """Skipped where the library is absent, as in continuous integration; torch is always there."""
    try:
        importlib.metadata.version(recipe.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{recipe.package} is not installed; scripts/check_recipes.py installs it")
    assert check_recipes.run(recipe, "muon", Path(sys.executable), tmp_path / "saved") == "ok"
