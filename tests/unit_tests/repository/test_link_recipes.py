# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Recipes and cases in a Megatron-LM checkout, as its generator of local jobs reads them."""

import itertools
import subprocess

import pytest
import yaml
from cases import load_cases
from helpers.ranks import ROOT


def link_recipes(*arguments):
    command = ["bash", str(ROOT / "scripts" / "link_recipes.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.fixture
def checkout(tmp_path):
    """The folders of a checkout that matter, with a case and a recipe of its own."""
    own = tmp_path / "tests/functional_tests/test_cases/gpt/gpt3_own/model_config.yaml"
    recipe = tmp_path / "tests/test_utils/recipes/h100/gpt.yaml"
    for path in (own, recipe):
        path.parent.mkdir(parents=True)
        path.write_text("own: true\n")
    return tmp_path


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


def jobs(checkout):
    """Give the script of each product, made as Megatron's ``generate_local_jobs.py`` makes it.

    Recipes of ``local_recipes``, products flattened over their lists, ``str.format`` with the spec.
    """
    scripts = {}
    for path in (checkout / "tests/test_utils/local_recipes").glob("**/*.yaml"):
        recipe = yaml.safe_load(path.read_text())
        for product in recipe["products"]:
            for block in product["products"]:
                for row in itertools.product(*block.values()):
                    spec = {**recipe["spec"], **dict(zip(block, row, strict=True))}
                    spec |= {"test_case": product["test_case"][0]}
                    spec |= {"assets_dir": "$OUTPUT_PATH", "artifacts_dir": "$OUTPUT_PATH"}
                    spec["name"] = spec["name"].format(**spec)
                    scripts[spec["name"], spec["scope"]] = spec["script"].format(**spec)
    return scripts


def test_generator_finds_recipes_and_cases(checkout):
    """A job for every case and scope, in valid bash, with paths that are there."""
    assert link_recipes(checkout).returncode == 0
    scripts = jobs(checkout)
    names = {name for name, _ in scripts}
    assert names == {f"{case.name}_dev_{case.platform}" for case in load_cases()}
    for (name, _), script in scripts.items():
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, (name, done.stderr)
        assert '"TRAINING_SCRIPT_PATH=-m megatron_muon pretrain_gpt.py"' in script
        (params,) = [line for line in script.splitlines() if "TRAINING_PARAMS_PATH=" in line]
        path = checkout / params.strip().strip('"').partition("=")[2]
        assert path.is_file()
        assert not path.is_symlink()
        golden = path.with_name(f"golden_values_dev_{name.rpartition('_dev_')[2]}.json")
        assert golden.name in script
        assert golden.is_file() == name.endswith("_cpu")


def test_linking_again_updates_and_removing_leaves_nothing(checkout):
    """What Megatron's scripts changed in a copy is put right; its own files stay."""
    before = files(checkout)
    link_recipes(checkout)
    linked = files(checkout)
    changed = next(
        path for path in linked if path.name == "model_config.yaml" and "muon" in str(path)
    )
    (checkout / changed).write_text("edited by run_ci_test.sh\n")
    assert link_recipes(checkout).returncode == 0
    assert files(checkout) == linked
    assert link_recipes(checkout, "--remove").returncode == 0
    assert files(checkout) == before


def test_golden_values_recorded_in_the_checkout_stay(checkout):
    """Linking again used to delete the one file that this repository cannot provide."""
    link_recipes(checkout)
    case = next(case for case in load_cases() if case.platform == "dgx_h100")
    folder = checkout / "tests/functional_tests/test_cases" / case.model / case.name
    golden = folder / case.golden_path.name
    golden.write_text("measured\n")
    assert link_recipes(checkout).returncode == 0
    assert link_recipes(checkout, "--remove").returncode == 0
    assert golden.read_text() == "measured\n"
    assert list(folder.iterdir()) == [golden]


def test_link_to_somewhere_else_is_never_replaced(checkout):
    """A recipe of the same name that somebody linked from elsewhere."""
    recipes = checkout / "tests/test_utils/local_recipes"
    recipes.mkdir()
    (recipes / "muon_gpt.yaml").symlink_to("/elsewhere/muon_gpt.yaml")
    done = link_recipes(checkout)
    assert done.returncode == 1
    assert "muon_gpt.yaml: expected a link of ours or nothing" in done.stderr


def test_files_of_megatron_are_never_replaced(checkout):
    """A case or a recipe of the same name that is not ours: an error, and nothing is changed."""
    case = load_cases()[0]
    own = checkout / "tests/functional_tests/test_cases" / case.model / case.name
    own.mkdir()
    (own / "model_config.yaml").write_text("upstream's\n")
    before = files(checkout)
    done = link_recipes(checkout)
    assert done.returncode == 1
    assert f"{case.name}/: expected a copy of ours or nothing" in done.stderr
    assert files(checkout) == before
