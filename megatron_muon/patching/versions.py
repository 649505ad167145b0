# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which versions are installed, and whether the patches were written for them."""

import importlib
import importlib.metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ACCEPTED_VERSIONS: dict[str, SpecifierSet] = {
    "megatron-core": SpecifierSet(">=0.19.2,<0.20"),
    "emerging-optimizers": SpecifierSet(">=0.3.0,<0.4"),
}


def installed_versions() -> dict[str, str | None]:
    """Read the versions of the packages that are patched or relied on.

    Returns:
        Version by package name; None where it is absent. megatron-core is asked for the version of
        the package that is imported, which in a source tree is not the installed wheel.
    """
    versions: dict[str, str | None] = {}
    try:
        # megatron-core appends the commit of whatever repository it lies in.
        found = Version(importlib.import_module("megatron.core").__version__)
        versions["megatron-core"] = found.public
    except ModuleNotFoundError:
        versions["megatron-core"] = None
    try:
        versions["emerging-optimizers"] = importlib.metadata.version("emerging-optimizers")
    except importlib.metadata.PackageNotFoundError:
        versions["emerging-optimizers"] = None
    return versions


def version_problems(versions: dict[str, str | None]) -> list[str]:
    """Compare installed versions with the accepted ranges.

    Args:
        versions: Version by package name, None where absent.

    Returns:
        One sentence for each package outside of its range; empty when all fit.
    """
    problems = []
    for name, accepted in ACCEPTED_VERSIONS.items():
        found = versions.get(name)
        if found is None:
            problems.append(f"{name}: expected a version {accepted}, found none installed.")
        elif not accepted.contains(Version(found), prereleases=True):
            problems.append(f"{name}: expected a version {accepted}, found {found}.")
    return problems
