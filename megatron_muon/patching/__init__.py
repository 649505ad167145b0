# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Change megatron-core at run time: explicit, verified before anything is applied, reversible."""

from collections.abc import Sequence

from megatron_muon.patching.errors import IncompatibleMegatronError
from megatron_muon.patching.patch import Patch, apply_all, revert_all, verify_all
from megatron_muon.patching.transformer_engine import transformer_engine_problems
from megatron_muon.patching.versions import (
    installed_versions,
    version_problems,
    warn_where_untested,
)

_applied: list[Patch] = []

__all__ = [
    "IncompatibleMegatronError",
    "applied_patches",
    "check_packages",
    "disable",
    "enable",
    "is_enabled",
]


def check_packages() -> None:
    """Check the versions of the packages, and that Transformer Engine is absent or whole.

    Nothing is imported, so that it can be done before what would fail.

    Raises:
        IncompatibleMegatronError: A package is not one that the patches were written for.
    """
    problems = version_problems(installed_versions()) + transformer_engine_problems()
    if problems:
        raise IncompatibleMegatronError(problems)


def enable() -> None:
    """Patch the installed megatron-core so that Muon runs under Megatron-FSDP.

    Calling it again does nothing. Every target is verified before the first is changed.

    Raises:
        IncompatibleMegatronError: A version or a target differs from what was tested; nothing was
            changed.
    """
    if _applied:
        return
    check_packages()
    try:
        from megatron_muon.mcore.patches import PATCHES, REQUIREMENTS
    except ImportError as error:
        problem = f"megatron-core: expected what Muon imports of it, found {error}."
        raise IncompatibleMegatronError([problem]) from error

    verify_all([*(patch.target for patch in PATCHES), *REQUIREMENTS])
    apply_all(PATCHES)
    _applied.extend(PATCHES)
    warn_where_untested(installed_versions())


def disable() -> None:
    """Restore what :func:`enable` changed. Without :func:`enable` before, it does nothing.

    Raises:
        RuntimeError: Somebody else wrapped a target since; nothing was restored.
    """
    revert_all(_applied)
    _applied.clear()


def is_enabled() -> bool:
    """Tell whether the patches are applied."""
    return bool(_applied)


def applied_patches() -> Sequence[Patch]:
    """List what is applied now."""
    return tuple(_applied)
