# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Change megatron-core at run time: explicit, verified before anything is applied, reversible."""

import logging
from collections.abc import Sequence

from megatron_muon.patching.errors import IncompatibleMegatronError
from megatron_muon.patching.patch import Patch, apply_all, revert_all, verify_all
from megatron_muon.patching.versions import installed_versions, version_problems

logger = logging.getLogger(__name__)

_applied: list[Patch] = []

__all__ = ["IncompatibleMegatronError", "applied_patches", "disable", "enable", "is_enabled"]


def enable() -> None:
    """Patch the installed megatron-core so that Muon runs under Megatron-FSDP.

    Calling it again does nothing. Every target is verified before the first is changed.

    Raises:
        IncompatibleMegatronError: A version or a target differs from what was tested; nothing was
            changed.
    """
    if _applied:
        return
    problems = version_problems(installed_versions())
    if problems:
        raise IncompatibleMegatronError(problems)
    from megatron_muon.mcore.patches import PATCHES, REQUIREMENTS

    verify_all([*(patch.target for patch in PATCHES), *REQUIREMENTS])
    apply_all(PATCHES)
    _applied.extend(PATCHES)


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
