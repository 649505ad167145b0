# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The environment's files: everything pinned and hashed, nothing tied to one machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from helpers.ranks import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

from megatron_muon.mcore.versions import ACCEPTED_VERSIONS

LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def locked_entries() -> dict[str, list[str]]:
    """Return the hashes of each ``name==version`` in the lock."""
    entries: dict[str, list[str]] = {}
    joined = LOCK.replace("\\\n", " ")
    for line in joined.splitlines():
        if line.strip() and not line.startswith("#"):
            pin, *hashes = re.split(r"\s+--hash=", line.strip())
            entries[pin.partition(";")[0].strip()] = hashes
    return entries


def locked_versions() -> dict[str, str]:
    return dict(pin.split("==") for pin in locked_entries())


def requirements_in() -> list[Requirement]:
    lines = (ROOT / "requirements.in").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_lock_pins_and_hashes_every_package() -> None:
    """Every entry is one version with at least one sha256, so that an install is reproducible."""
    entries = locked_entries()
    assert len(entries) > 20
    for pin, hashes in entries.items():
        assert re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.+!]+", pin), pin
        assert hashes, pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value.strip()) for value in hashes), pin


def test_workflow_asks_for_a_version_of_python_where_the_environment_is_built() -> None:
    """It set the variable that names an interpreter instead: "3.12: command not found"."""
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    (variable,) = re.findall(r"^ +(\w+): \$\{\{ matrix\.python \}\}$", workflow, re.M)
    script = (ROOT / "scripts" / "environment.sh").read_text()
    assert f"\npython_version=${{{variable}:-3.12}}\n" in script


def test_lock_names_no_host_and_no_path() -> None:
    """The lock works with any registry: it holds no URL, index option, or folder."""
    assert "://" not in LOCK
    assert "index-url" not in LOCK
    assert "find-links" not in LOCK
    assert " @ " not in LOCK
    assert not re.search(r"(^|\s)(/|-e|file:)", LOCK, flags=re.MULTILINE)


def test_lock_holds_what_requirements_in_asks_for() -> None:
    """The lock was compiled from today's requirements.in."""
    versions = locked_versions()
    for requirement in requirements_in():
        assert Version(versions[requirement.name]) in requirement.specifier, requirement


@pytest.mark.parametrize("extra", [None, "quickstart", "test"])
def test_lock_agrees_with_pyproject(extra: str | None) -> None:
    """What the package asks for at installation is what the scripts install and test."""
    versions = locked_versions()
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in map(Requirement, listed):
        assert Version(versions[requirement.name]) in requirement.specifier, requirement


def test_enable_accepts_what_pip_installs() -> None:
    """The lock, and what the metadata of the package admits."""
    required = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["megatron"]]
    listed = {r.name: r.specifier for r in map(Requirement, required)}
    for name, accepted in ACCEPTED_VERSIONS.items():
        assert accepted.contains(locked_versions()[name])
        for bound in listed[name]:
            assert bound.operator == "<" or accepted.contains(bound.version)


def test_plain_fsdp2_installs_no_megatron() -> None:
    """Nor what megatron alone imports."""
    names = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert names == {"emerging-optimizers", "torch", "packaging", "numpy"}


def test_transformer_engine_extra_asks_for_both_parts() -> None:
    """Without core and torch extension the bare package breaks ``import megatron.core``."""
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"]["te"])
    assert {"pytorch"} < requirement.extras
    assert any(extra.startswith("core_cu") for extra in requirement.extras)


def test_python_version_file_agrees_with_pyproject() -> None:
    """The interpreter that pyenv and uv pick is one that the package accepts."""
    python = (ROOT / ".python-version").read_text().strip()
    assert PROJECT["requires-python"] == f">={python}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_script_parses(script: Path) -> None:
    """Bash reads every script without a syntax error."""
    subprocess.run(["bash", "-n", str(script)], check=True)
