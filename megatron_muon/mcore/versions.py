# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Accepted releases of the packages that are patched or relied on.

Symbols of an accepted release are verified one by one. docs/support.md has the table of the
combinations that were run.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_muon.user_errors import UserError

# Minor versions of megatron-core are not interchangeable: patches rely on its internals. The last
# one is Megatron-LM's main, which no registry has. torch and emerging-optimizers have no upper
# bound: containers bring builds of their own. step/dependencies.py checks their APIs.
ACCEPTED_VERSIONS = {
    "megatron-core": SpecifierSet(">=0.19,<=0.20.0"),
    "emerging-optimizers": SpecifierSet(">=0.3"),
    "torch": SpecifierSet(">=2.9"),
}


class IncompatibleMegatronError(UserError, RuntimeError):
    """The installed packages differ from the versions that the patches were written for.

    Args:
        problems: One sentence for each difference: symbol, expected, found.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = ["megatron-muon cannot be enabled, nothing was changed:", *problems]
        super().__init__("\n  ".join(lines) + "\nInstall a release of docs/support.md (Versions).")


# Cached: reading megatron-core's version runs git.
@functools.cache
def installed_versions() -> Mapping[str, str | None]:
    """Read the versions of the packages that are patched or relied on, without importing them.

    Returns:
        Version by package name; None if it is absent. For megatron-core it is the version of the
        package that would be imported, which may be a source tree instead of the installed wheel.
    """
    versions: dict[str, str | None] = dict.fromkeys(ACCEPTED_VERSIONS)
    for name in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    megatron = importlib.util.find_spec("megatron")
    # Its file is run, as importing megatron.core would need its dependencies.
    for folder in (megatron and megatron.submodule_search_locations) or ():
        file = Path(folder, "core", "package_info.py")
        if file.is_file():
            # Without the commit of the repository around it, which for a wheel is another one.
            versions["megatron-core"] = Version(runpy.run_path(str(file))["__version__"]).public
            break
    return versions


def check_versions() -> None:
    """Check that the installed versions are in the accepted ranges.

    It needs no import of megatron, which would fail with other errors.

    Raises:
        IncompatibleMegatronError: The patches were not written for a package.
    """
    if problems := version_problems(installed_versions()):
        raise IncompatibleMegatronError(problems)


def version_problems(versions: Mapping[str, str | None]) -> list[str]:
    """Compare installed versions with the accepted ranges.

    Args:
        versions: Version by package name, None if absent.

    Returns:
        One sentence for each package outside of its range. Builds before a release (2.11.0a0, in
        containers) count as that release.
    """
    return [
        f"{name}: expected a version {accepted}, found {versions[name] or 'none installed'}."
        for name, accepted in ACCEPTED_VERSIONS.items()
        if not accepted.contains(Version(versions[name] or "0").base_version)
    ]
