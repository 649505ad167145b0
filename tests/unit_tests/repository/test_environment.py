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


def test_lock_pins_and_hashes_every_package() -> None:
    """Every entry is one version with at least one sha256, so that an install is reproducible."""
    entries = locked_entries()
    assert len(entries) > 20
    for pin, hashes in entries.items():
        assert re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.+!]+", pin), pin
        assert hashes, pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value.strip()) for value in hashes), pin


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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_script_parses(script: Path) -> None:
    """Bash reads every script without a syntax error."""
    subprocess.run(["bash", "-n", str(script)], check=True)
