# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Accepted and tested releases of the packages that are patched or relied on.

A release in the accepted range is tried: its symbols are verified as usual, and a warning names it
if it is outside of the tested range. ``check_compat.py`` has the table of the combinations
that were run.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_muon.user_errors import UserError

logger = logging.getLogger(__name__)

# Minor versions of megatron-core are not interchangeable: patches rely on its internals. The last
# one is Megatron-LM's main, which no registry has. torch and emerging-optimizers have no upper
# bound: containers bring builds of their own. step/dependencies.py checks their APIs.
ACCEPTED_VERSIONS: dict[str, SpecifierSet] = {
    "megatron-core": SpecifierSet(">=0.19,<=0.20.0"),
    "emerging-optimizers": SpecifierSet(">=0.3"),
    "torch": SpecifierSet(">=2.9"),
}
_TESTED_VERSIONS: dict[str, SpecifierSet] = {
    "megatron-core": SpecifierSet(">=0.19.0,<=0.19.2"),
    "emerging-optimizers": SpecifierSet(">=0.3.0,<=0.4.0"),
    "torch": SpecifierSet(">=2.9.1,<=2.15.0"),
}
# The versions of requirements.lock, with which all tests run.
_INSTALL = {"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0", "torch": "2.15.0"}
_REPAIRS = {
    # A source tree on the path hides what pip installs.
    "megatron-core": "--no-deps {} einops, or check out that release in the source tree",
    "emerging-optimizers": "--no-deps {} absl-py",
    "torch": "{}",
}


class IncompatibleMegatronError(UserError, RuntimeError):
    """The installed packages differ from those that the patches were written for.

    Args:
        problems: One sentence for each difference: symbol, expected, found.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "megatron-muon cannot be enabled, nothing was changed:\n  "
            + "\n  ".join(self.problems)
            + f"\n{_tested_text()}"
        )


def _tested_text() -> str:
    ranges = ", ".join(f"{name} {versions}" for name, versions in _TESTED_VERSIONS.items())
    pins = " ".join(f"{name}=={version}" for name, version in _INSTALL.items())
    return f"Tested: {ranges} (docs/support.md). In a new environment: pip install {pins}"


# Cached: it does not change, and megatron-core's version needs a call of git.
@functools.cache
def installed_versions() -> Mapping[str, str | None]:
    """Read the versions of the packages that are patched or relied on, without importing them.

    Returns:
        Version by package name; None if it is absent. For megatron-core it is the version of the
        package that would be imported, which may be a source tree instead of the installed wheel.
    """
    versions: dict[str, str | None] = {"megatron-core": _megatron_core_version()}
    for name in list(ACCEPTED_VERSIONS)[1:]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return MappingProxyType(versions)


def _megatron_core_version() -> str | None:
    # Its file is run, as importing megatron.core would need its dependencies.
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("package_info.py")
    # Without the commit of the repository around it, which for a wheel is another one.
    return Version(runpy.run_path(str(file))["__version__"]).public


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
        One sentence for each package outside of its range, with the command that repairs it and
        replaces nothing else. Builds before a release (2.11.0a0, in containers) count as that
        release.
    """
    return [
        f"{name}: expected a version {accepted}, found {versions[name] or 'none installed'}. "
        f"Run: pip install {_REPAIRS[name].format(f'{name}=={_INSTALL[name]}')}"
        for name, accepted in ACCEPTED_VERSIONS.items()
        if not _is_in(accepted, versions[name])
    ]


def _is_in(accepted: SpecifierSet, version: str | None) -> bool:
    return version is not None and accepted.contains(Version(version).base_version)


def warn_where_untested(versions: Mapping[str, str | None]) -> None:
    """Warn on rank 0 if a version is outside of the tested range."""
    untested = [
        f"{name} {versions[name]}"
        for name, tested in _TESTED_VERSIONS.items()
        if not _is_in(tested, versions[name])
    ]
    if untested and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: expected a version in the tested range, got another one; every symbol relied on "
            "is as in the tested ones. %s",
            ", ".join(untested),
            _tested_text(),
        )
