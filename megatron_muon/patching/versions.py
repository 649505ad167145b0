# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which releases were run together: one table for ``enable()``, its errors and the check of it.

``scripts/check_compat.py`` runs every row that can be installed in an environment of its own and
fails where the table says something else. A release inside of the accepted ranges that is in no
row is tried: its symbols are verified as those of any other, and a warning names it. One outside of
them is refused, but for a source tree of the table.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

logger = logging.getLogger(__name__)

# Also the dependencies of pyproject.toml. Minor versions are not interchangeable: the patches rely
# on internals of Megatron-FSDP, the optimizer on those of DTensor and of emerging-optimizers.
ACCEPTED_VERSIONS: dict[str, SpecifierSet] = {
    "megatron-core": SpecifierSet(">=0.19,<0.20"),
    "emerging-optimizers": SpecifierSet(">=0.3,<0.4"),
    "torch": SpecifierSet(">=2.10,<2.13"),
}


@dataclass(frozen=True)
class Combination:
    """Releases that were run together.

    Args:
        megatron_core: Release of megatron-core.
        emerging_optimizers: Release of emerging-optimizers.
        torch: Release of torch.
        refusal: Why it is refused; empty where it works.
        tree: The source tree that gives itself this version of megatron-core, for which no wheel
            was released; empty where there is one.
        commit: Start of the tree's commit, where other commits have the same version.
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
    Combination("0.19.2", "0.3.0", "2.11.0"),
    Combination("0.19.2", "0.3.0", "2.12.0"),
    Combination("0.19.2", "0.3.0", "2.10.0"),
    Combination("0.19.0", "0.3.0", "2.11.0"),
    Combination("0.19.1", "0.3.0", "2.11.0", tree="Megatron-LM's tag core_v0.19.0"),
    Combination("0.20.0", "0.3.0", "2.11.0", tree="Megatron-LM's main", commit="d98e8a64"),
    Combination(
        "0.18.2",
        "0.3.0",
        "2.11.0",
        refusal="its fsdp_dtensor checkpoints and its Muon of fused QKV are other code",
    ),
)


def table_text() -> str:
    """Lay the table out for an error message, with the command that installs its first row."""
    names = tuple(ACCEPTED_VERSIONS)
    lines = [(*names, ""), *((*row.versions.values(), _verdict(row)) for row in TABLE)]
    widths = [len(name) for name in names]
    text = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]
    pins = " ".join(f"{name}=={version}" for name, version in TABLE[0].versions.items())
    return "\n  ".join(["Run together:", *map(str.rstrip, text)]) + f"\nInstall: pip install {pins}"


def _verdict(row: Combination) -> str:
    if row.refusal:
        return f"no: {row.refusal}"
    commit = f", tried at commit {row.commit}" if row.commit else ""
    return f"works (source tree, no wheel: {row.tree}{commit})" if row.tree else "works"


# They do not change while a process runs, and reading them takes a call of git.
@functools.cache
def installed_versions() -> Mapping[str, str | None]:
    """Read the versions of the packages that are patched or relied on, without importing them.

    Returns:
        Version by package name; None where it is absent. megatron-core is asked for the version of
        the package that would be imported, which in a source tree is not the installed wheel.
    """
    versions: dict[str, str | None] = {"megatron-core": _megatron_core_version()}
    for name in list(ACCEPTED_VERSIONS)[1:]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return MappingProxyType(versions)


def _megatron_core_version() -> str | None:
    """Run the file of megatron.core that holds its version: importing it needs its dependencies."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    found = runpy.run_path(str(Path(spec.origin).with_name("package_info.py")))["__version__"]
    version = Version(found)
    # It appends the commit of whatever repository it lies in: of an installed wheel, ours.
    has_commits = any(row.commit and row.megatron_core == version.public for row in TABLE)
    return str(version) if has_commits else version.public


def version_problems(versions: Mapping[str, str | None]) -> list[str]:
    """Compare installed versions with the accepted ranges.

    Args:
        versions: Version by package name, None where absent.

    Returns:
        One sentence for each package outside of its range; empty when all fit. Builds of a release
        that is not out yet (2.11.0a0, as containers have them) count as that release.
    """
    problems = []
    for name, accepted in ACCEPTED_VERSIONS.items():
        found = versions.get(name)
        if found is None:
            problems.append(f"{name}: expected a version {accepted}, found none installed.")
        elif not accepted.contains(Version(found).base_version) and not _is_in_table(name, found):
            problems.append(f"{name}: expected a version {accepted}, found {found}.")
    return problems


def _is_in_table(name: str, found: str) -> bool:
    """Return whether a version beyond the range is that of a row that works."""
    return any(
        Version(found).base_version == row.versions[name] for row in TABLE if not row.refusal
    )


def is_tested(versions: Mapping[str, str | None]) -> bool:
    """Return whether these versions are a row of the table that works.

    Local parts do not count, but for the commit of a row that names one.
    """
    found = {name: Version(version or "0").public for name, version in versions.items()}
    commit = Version(versions.get("megatron-core") or "0").local or ""
    return any(
        row.versions == found and not row.refusal and _is_commit(commit, row.commit)
        for row in TABLE
    )


def _is_commit(found: str, tried: str) -> bool:
    """Return whether two starts of a commit's name, of any length, agree; git gives 7 or more."""
    return not tried or (len(found) >= 7 and (found.startswith(tried) or tried.startswith(found)))


def warn_where_untested(versions: Mapping[str, str | None]) -> None:
    """Log on rank 0 that versions within the ranges were never run together."""
    if is_tested(versions) or os.environ.get("RANK", "0") != "0":
        return
    logger.warning(
        "%s: expected a tested combination, found one that nobody has run; every symbol relied on "
        "is as in the tested ones. %s",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        table_text(),
    )
