# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Apply the patches to the installed megatron-core, and revert them."""

from megatron_muon.mcore.patching import Patch, apply_all, exists, revert_all
from megatron_muon.mcore.versions import (
    IncompatibleMegatronError,
    check_versions,
    installed_versions,
    warn_where_untested,
)

# Importing this module imports no megatron: ``megatron_muon`` exports its functions.
_applied: list[Patch] = []


def enable() -> None:
    """Patch the installed megatron-core so that Muon runs under Megatron-FSDP.

    Calling it again does nothing. All targets are verified before the first is changed.

    Raises:
        IncompatibleMegatronError: A version or target differs from the tested ones; nothing was
            changed.
    """
    if is_enabled():
        return
    check_versions()
    # Only now: it imports torch.
    from megatron_muon.step.dependencies import dependency_problems

    # Before megatron is imported, which may fail if they lack an API.
    if problems := dependency_problems():
        raise IncompatibleMegatronError(problems)
    try:
        from megatron_muon.mcore.patches import LATER_PATCHES, PATCHES, V2_PATCHES
    except ImportError as error:
        problem = f"megatron-core: expected the names that Muon imports, found {error}."
        raise IncompatibleMegatronError([problem]) from error
    from megatron_muon.mcore.relied_on import V2_FLAG, relied_on_problems

    has_v2 = exists(V2_FLAG)
    patches = [*PATCHES, *(patch for patch in LATER_PATCHES if exists(patch.symbol))]
    patches += V2_PATCHES if has_v2 else ()
    patches = [patch for patch in patches if not patch.is_repaired()]
    problems = [problem for patch in patches for problem in patch.problems()]
    if problems := problems + relied_on_problems(has_v2=has_v2):
        raise IncompatibleMegatronError(problems)
    apply_all(patches)
    _applied.extend(patches)
    warn_where_untested(installed_versions())


def disable() -> None:
    """Revert the patches of ``enable()``; do nothing if it was not called.

    Raises:
        RuntimeError: A target was wrapped again since; nothing was restored.
    """
    revert_all(_applied)
    _applied.clear()


def is_enabled() -> bool:
    """Return whether ``enable()`` was called."""
    return bool(_applied)


def num_patches() -> int:
    """Return the number of patches that are applied."""
    return len(_applied)
