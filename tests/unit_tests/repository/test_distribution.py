# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Wheel and source distribution: built offline, complete, and without anything else."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from helpers.ranks import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both files, built without network from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_muon", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "built", "."]
    # Nothing can be fetched through such a proxy.
    offline = {"PIP_NO_INDEX": "1", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        command,
        cwd=source,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "built"


def _names(built: Path) -> tuple[set[str], set[str]]:
    """Return the files of the wheel, and those of the source distribution below its folder."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files, tarfile.open(sdist) as archive:
        return set(files.namelist()), {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }


def test_both_hold_the_package_with_types_and_license_and_no_tests(built: Path) -> None:
    """A module that is left out would be found by users first."""
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "megatron_muon").rglob("*.py")}
    in_wheel, in_sdist = _names(built)
    for names in (in_wheel, in_sdist):
        assert modules | {"megatron_muon/py.typed"} <= names
        assert any(name.rpartition("/")[2] == "LICENSE" for name in names)
        others = {name for name in names if name.endswith(".py")} - modules
        assert not others and not any(name.startswith("tests") for name in names)


def test_wheel_steps_with_torch_and_emerging_optimizers_alone(built: Path, tmp_path: Path) -> None:
    """Unpacked first on the path, in place of this checkout, and without megatron."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    program = """
import sys
sys.modules["megatron"] = sys.modules["einops"] = None
import torch, megatron_muon
from megatron_muon.fsdp2 import Muon
param = torch.nn.Parameter(torch.eye(2, 3))
param.grad = torch.ones(2, 3)
Muon([param], fp32_matmul_prec="highest").step()
print(megatron_muon.__file__, bool(param.isfinite().all()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "megatron_muon" / "__init__.py"), "True"]


EDITABLE = """
import sys
from setuptools.build_meta import build_editable
build_editable(sys.argv[1])
"""
USER_SCRIPT = """
from megatron_muon.plan.settings import ExchangeSettings

reveal_type(ExchangeSettings().max_owners)
"""


def test_type_checker_follows_an_editable_install(tmp_path: Path) -> None:
    """The package has types, and mypy found no module: the install was a hook for imports."""
    source, folder = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_muon", source / "megatron_muon", ignore=ignored)
    command = [sys.executable, "-c", EDITABLE, str(tmp_path)]
    subprocess.run(command, cwd=source, capture_output=True, check=True, timeout=120)
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    python = str(folder / "bin" / "python")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "script.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 'Revealed type is "int"' in done.stdout, done.stdout + done.stderr
