# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's containers, as far as metadata can stand for them: no container was run."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = next(path for path in Path(__file__).resolve().parents if (path / "pyproject.toml").exists())
# That of the image in which Megatron-LM's tag core_v0.19.0 is tested.
TORCH = "2.13.0a0+8145d630e8"


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """A folder to put on the path: torch's build, and megatron as the folder of a source tree."""
    _add_package(tmp_path, "torch", TORCH)
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('imported')")
    (core / "package_info.py").write_text("__version__ = '0.19.1'")
    return tmp_path


def _add_package(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _run(container: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(container), str(ROOT)])},
        timeout=120,
    )


def test_what_an_image_lacks_is_one_sentence_with_the_command(container: Path) -> None:
    """emerging-optimizers 0.2.0 is there; the command replaces it and nothing else."""
    _add_package(container, "emerging_optimizers", "0.2.0")
    script = container / "script.py"
    script.touch()
    done = _run(container, "-m", "megatron_muon", str(script))
    assert done.returncode == 1
    _, problem, table = done.stderr.split("\n", 2)
    assert problem.strip() == (
        "emerging-optimizers: expected a version >=0.3, found 0.2.0. Run: pip install --no-deps "
        "emerging-optimizers==0.3.0 absl-py"
    )
    assert table.startswith("Run together:") and "Traceback" not in done.stderr


def test_releases_of_an_image_are_accepted(container: Path) -> None:
    """Its build of torch and the version that its source tree gives itself."""
    _add_package(container, "emerging_optimizers", "0.4.0")
    done = _run(
        container,
        "-c",
        "from megatron_muon.patching.versions import installed_versions, version_problems\n"
        "print(*installed_versions().values(), version_problems(installed_versions()))",
    )
    assert done.stdout.split() == ["0.19.1", "0.4.0", TORCH, "[]"], done.stderr


def test_no_installation_replaces_the_torch_of_an_image() -> None:
    """Even without --no-deps: pip keeps an installed version that the metadata accepts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    for version in (TORCH, "2.15.0+cu132", "2.17.0a0+nv27.01"):
        assert torch.specifier.contains(version, prereleases=True)
