# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Wheel and source distribution: built offline, complete, and of the locked versions."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.ranks import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

from megatron_muon.mcore.versions import ACCEPTED_VERSIONS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = dict(re.findall(r"^([\w.-]+)==([\w.+!]+)", (ROOT / "requirements.lock").read_text(), re.M))


@pytest.mark.parametrize("extra", [None, "quickstart", "test"])
def test_lock_agrees_with_pyproject(extra: str | None) -> None:
    """The lock has versions that the metadata of the package accepts."""
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in map(Requirement, listed):
        assert Version(LOCKED[requirement.name]) in requirement.specifier, requirement


def test_enable_accepts_what_pip_installs() -> None:
    """enable() accepts all versions that pip installs, and plain FSDP2 needs no megatron."""
    required = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["megatron"]]
    listed = {r.name: r.specifier for r in map(Requirement, required)}
    for name, accepted in ACCEPTED_VERSIONS.items():
        assert accepted.contains(LOCKED[name])
        assert all(b.operator == "<" or accepted.contains(b.version) for b in listed[name])
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert names == {"emerging-optimizers", "torch", "packaging", "numpy"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("megatron_muon", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def built(source: Path) -> Path:
    """Return the folder of both files, built without network."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "built", "."]
    # Nothing can be fetched through such a proxy.
    offline = {"PIP_NO_INDEX": "1", "https_proxy": "http://127.0.0.1:9"}
    done = run_command(*command, cwd=source, env=offline)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "built"


def test_wheel_and_sdist_hold_the_package_without_tests(built: Path) -> None:
    """Wheel and source distribution hold every module, and no test."""
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "megatron_muon").rglob("*.py")}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files, tarfile.open(sdist) as archive:
        in_sdist = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
        for names in (set(files.namelist()), in_sdist):
            assert modules | {"megatron_muon/py.typed"} <= names
            assert any(name.rpartition("/")[2] == "LICENSE" for name in names)
            others = {name for name in names if name.endswith(".py")} - modules
            assert not others and not any(name.startswith("tests") for name in names)


@pytest.mark.slow
def test_wheel_steps_with_torch_and_emerging_optimizers_alone(built: Path, tmp_path: Path) -> None:
    """The unpacked wheel steps without megatron and without loading torch's compiler."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    program = """
import sys
sys.path.insert(0, sys.argv[1])
sys.modules["megatron"] = sys.modules["einops"] = None
import torch, megatron_muon
from megatron_muon.fsdp2 import Muon
# Lion, whose update is compiled, once loaded torch's compiler: 5 s and 89 MB a process.
print(any(name.startswith("torch._inductor") for name in sys.modules))
param = torch.nn.Parameter(torch.eye(2, 3))
param.grad = torch.ones(2, 3)
Muon([param], fp32_matmul_prec="highest").step()
print(megatron_muon.__file__, bool(param.isfinite().all()))
"""
    done = run_command(sys.executable, "-c", program, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = ["False", str(tmp_path / "megatron_muon" / "__init__.py"), "True"]
    assert done.stdout.split() == expected


EDITABLE = "import sys; from setuptools.build_meta import build_editable as b; b(sys.argv[1])"
USER_SCRIPT = """
from megatron_muon.plan.settings import ExchangeSettings
reveal_type(ExchangeSettings().max_owners)
"""


def test_type_checker_follows_an_editable_install(source: Path, tmp_path: Path) -> None:
    """A type checker finds the package in an editable install."""
    done = run_command(sys.executable, "-c", EDITABLE, str(tmp_path), cwd=source)
    assert done.returncode == 0, done.stderr
    venv.create(tmp_path / "environment")
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as files:
        files.extractall(site)
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    python = str(tmp_path / "environment" / "bin" / "python")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "script.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 'Revealed type is "int"' in done.stdout, done.stdout + done.stderr
