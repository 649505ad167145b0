# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Recipes of trainers: those without a library run, the others say what they lack."""

import importlib.metadata
import runpy
import sys
from pathlib import Path

import check_recipes
import pytest
from helpers.ranks import ROOT

RECIPES = ROOT / "scripts" / "recipes"
WITH_LIBRARY = [recipe for recipe in check_recipes.RECIPE_LIST if recipe.package != "torch"]
IDS = [recipe.script for recipe in WITH_LIBRARY]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_script_runs_every_recipe():
    """A recipe that the table lacks would never be run."""
    scripts = {path.stem for path in RECIPES.glob("[!_]*.py")}
    assert {recipe.script for recipe in check_recipes.RECIPE_LIST} == scripts


@pytest.mark.parametrize("recipe", WITH_LIBRARY, ids=IDS)
def test_recipe_without_its_library_says_what_to_install(recipe, monkeypatch):
    """Not with the traceback of an import."""

    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.syspath_prepend(str(RECIPES))
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(RECIPES / f"{recipe.script}.py"))
    message = str(error.value)
    assert message.startswith(f"{recipe.package}: expected it to be installed, found none")
    assert "requirements.txt" in message and "scripts/check_recipes.py" in message


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.cpu_only
@pytest.mark.parametrize("recipe", WITH_LIBRARY, ids=IDS)
def test_recipe_with_its_library_trains_and_resumes(recipe, tmp_path):
    """Skipped where the library is absent, as in continuous integration."""
    if not _is_installed(recipe.package):
        pytest.skip(f"{recipe.package} is not installed; scripts/check_recipes.py installs it")
    assert check_recipes.run(recipe, "muon", Path(sys.executable), tmp_path / "saved") == "ok"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.cpu_only
def test_check_runs_the_recipe_that_needs_only_torch(monkeypatch, capsys):
    """The command of docs/trainers.md, in the environment of the tests, with both optimizers."""
    monkeypatch.setattr(check_recipes, "build_environment", lambda folder: Path(sys.executable))
    assert check_recipes.main(["--only", "xtuner"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    for row, optimizer in zip(rows, ("muon", "adamw"), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert [cells[0], *cells[3:5]] == ["with_xtuner_groups", optimizer, "ok"], row
