# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The releases that were run together: one table for ``enable()``, its errors and its checks.

``scripts/check_compat.py`` runs every row that can be installed, in an environment of its own, and
fails if the outcome differs from the table. A release within the accepted ranges but in no row is
tried: its symbols are verified as usual, and a warning names it. One outside of the ranges is
refused, unless it is a source tree of the table.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_muon.user_errors import UserError

logger = logging.getLogger(__name__)

# Also the dependencies of pyproject.toml. Minor versions of megatron-core are not interchangeable:
# patches rely on its internals. torch and emerging-optimizers have no upper bound: containers bring
# builds of their own. What is relied on in them is checked (runtime/dependencies.py).
ACCEPTED_VERSIONS: dict[str, SpecifierSet] = {
    "megatron-core": SpecifierSet(">=0.19,<0.20"),
    "emerging-optimizers": SpecifierSet(">=0.3"),
    "torch": SpecifierSet(">=2.9"),
}


@dataclass(frozen=True)
class Combination:
    """Releases that were run together.

    Args:
        megatron_core: Release.
        emerging_optimizers: Release.
        torch: Release.
        refusal: Why it is refused; empty if it works.
        tree: Source tree of what no registry offers; empty if wheels were released.
        commit: Start of the commit of megatron-core, if others have the same version.
    """

    megatron_core: str
    emerging_optimizers: str
    torch: str
    refusal: str = ""
    tree: str = ""
    commit: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """Version by package name, in the order of ``ACCEPTED_VERSIONS``."""
        found = (self.megatron_core, self.emerging_optimizers, self.torch)
        return dict(zip(ACCEPTED_VERSIONS, found, strict=True))


TABLE: tuple[Combination, ...] = (
    Combination("0.19.2", "0.3.0", "2.15.0"),
    Combination("0.19.2", "0.3.0", "2.14.1"),
    Combination("0.19.2", "0.3.0", "2.13.0"),
    Combination("0.19.2", "0.3.0", "2.12.0"),
    Combination("0.19.2", "0.3.0", "2.11.0"),
    Combination("0.19.2", "0.4.0", "2.11.0", tree="Emerging-Optimizers' tag v0.4.0"),
    Combination("0.19.2", "0.3.0", "2.10.0"),
    Combination("0.19.2", "0.3.0", "2.9.1"),
    Combination("0.19.0", "0.3.0", "2.11.0"),
    Combination("0.19.1", "0.3.0", "2.11.0", tree="Megatron-LM's tag core_v0.19.0"),
    Combination("0.20.0", "0.3.0", "2.15.0", tree="Megatron-LM's main", commit="d98e8a64"),
    Combination("0.20.0", "0.3.0", "2.11.0", tree="Megatron-LM's main", commit="d98e8a64"),
    Combination(
        "0.18.2",
        "0.3.0",
        "2.11.0",
        refusal="its fsdp_dtensor checkpoints and its Muon of fused QKV are other code",
    ),
)


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
            + f"\n{table_text()}"
        )


def table_text() -> str:
    """Format the table for an error, with the command for a new environment of its first row."""
    lines = ["Run together:"]
    rows = [(*row.versions.values(), _verdict(row)) for row in TABLE]
    for *cells, verdict in ((*ACCEPTED_VERSIONS, ""), *rows):
        padded = map(str.ljust, cells, map(len, ACCEPTED_VERSIONS))
        lines.append("  ".join([*padded, verdict]).rstrip())
    pins = " ".join(f"{name}=={version}" for name, version in TABLE[0].versions.items())
    return "\n  ".join(lines) + f"\nIn a new environment: pip install {pins}"


def megatron_of_table() -> tuple[str, str]:
    """Return the releases of megatron-core that work, and the commits of its main, as texts."""
    rows = [row for row in TABLE if not row.refusal]
    releases = sorted({row.megatron_core for row in rows if not row.commit})
    commits = {f"{row.tree} at {row.commit}" for row in rows if row.commit}
    return f"megatron-core {', '.join(releases)}", ", ".join(sorted(commits))


def _verdict(row: Combination) -> str:
    if row.refusal:
        return f"no: {row.refusal}"
    commit = f", tried at commit {row.commit}" if row.commit else ""
    return f"works (source tree, no wheel: {row.tree}{commit})" if row.tree else "works"


# They do not change while a process runs, and megatron-core's needs a call of git.
@functools.cache
def installed_versions() -> Mapping[str, str | None]:
    """Read the versions of the packages that are patched or relied on, without importing them.

    Returns:
        Version by package name; None if it is absent. That of megatron-core is the version of the
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
    found = runpy.run_path(str(Path(spec.origin).with_name("package_info.py")))["__version__"]
    version = Version(found)
    # It appends the commit of the repository around it: for an installed wheel, of this one.
    has_commits = any(row.commit and row.megatron_core == version.public for row in TABLE)
    return str(version) if has_commits else version.public


def version_problems(versions: Mapping[str, str | None]) -> list[str]:
    """Compare installed versions with the accepted ranges.

    Args:
        versions: Version by package name, None if absent.

    Returns:
        One sentence for each package outside of its range, with the command that repairs it and
        replaces nothing else. Builds before a release (2.11.0a0, in containers) count as that
        release.
    """
    problems = []
    for name, accepted in ACCEPTED_VERSIONS.items():
        found = versions.get(name)
        if found is None:
            problems.append(
                f"{name}: expected a version {accepted}, found none installed. {_repair(name)}"
            )
        elif not accepted.contains(Version(found).base_version) and not _is_in_table(name, found):
            problems.append(
                f"{name}: expected a version {accepted}, found {found}. {_repair(name)}"
            )
    return problems


def _repair(name: str) -> str:
    """Return the command that installs a package beside the others, as they are."""
    tested = f"{name}=={TABLE[0].versions[name]}"
    if name == "torch":
        return f"Run: pip install {tested}"
    if name == "emerging-optimizers":
        return f"Run: pip install --no-deps {tested} absl-py"
    # A source tree on the path hides what pip installs.
    return (
        f"Run: pip install --no-deps {tested} einops; in a source tree: git checkout core_v0.19.0"
    )


def _is_in_table(name: str, found: str) -> bool:
    """Return whether a version outside of the range is that of a row that works."""
    return any(
        Version(found).base_version == row.versions[name] for row in TABLE if not row.refusal
    )


def is_tested(versions: Mapping[str, str | None]) -> bool:
    """Return whether these versions are a row of the table that works.

    Builds of torch before a release count as that release. Local parts are only compared if the row
    names a commit.
    """
    parsed = {name: Version(version or "0") for name, version in versions.items()}
    found = {
        name: version.base_version if name == "torch" else version.public
        for name, version in parsed.items()
    }
    commit = Version(versions.get("megatron-core") or "0").local or ""
    return any(
        row.versions == found and not row.refusal and _is_commit(commit, row.commit)
        for row in TABLE
    )


def _is_commit(found: str, tried: str) -> bool:
    """Return whether two abbreviations of a commit agree; git's have 7 characters or more."""
    return not tried or (len(found) >= 7 and (found.startswith(tried) or tried.startswith(found)))


def warn_where_untested(versions: Mapping[str, str | None]) -> None:
    """Warn on rank 0 if these versions were never run together."""
    if is_tested(versions) or os.environ.get("RANK", "0") != "0":
        return
    logger.warning(
        "%s: expected a tested combination, found one that nobody has run; every symbol relied on "
        "is as in the tested ones. %s",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        table_text(),
    )
