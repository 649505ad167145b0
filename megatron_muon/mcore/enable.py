# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Apply the patches to the installed megatron-core, and revert them."""

import logging
import sys

from megatron_muon.mcore.patching import PATCHED, Patch, apply_all, exists, revert_all
from megatron_muon.mcore.versions import (
    IncompatibleMegatronError,
    check_versions,
    installed_versions,
    warn_where_untested,
)

# Importing this module imports no megatron: ``megatron_muon`` exports its functions.
logger = logging.getLogger(__name__)


def enable() -> None:
    """Patch the installed megatron-core so that Muon runs under Megatron-FSDP.

    Calling it again does nothing. All targets are verified before the first is changed. It may be
    called before or after megatron's modules are imported, but before a model is wrapped. Functions
    of Megatron-Bridge are patched once it is imported.

    Raises:
        IncompatibleMegatronError: A version or target differs from the tested ones; nothing was
            changed.
    """
    if is_enabled():
        return
    check_versions()
    # Only now: it imports torch.
    from megatron_muon.step.dependencies import missing_names

    # Before megatron is imported, which may fail if they lack an API.
    if problems := missing_names():
        raise IncompatibleMegatronError(problems)
    try:
        from megatron_muon.mcore.patches import (
            BRIDGE_PATCHES,
            LATER_PATCHES,
            PATCHES,
            V2_PATCHES,
        )
    except ImportError as error:
        problem = f"megatron-core: expected the names that Muon imports, found {error}."
        raise IncompatibleMegatronError([problem]) from error
    from megatron_muon.mcore.relied_on import V2_FLAG, relied_on_problems, v2_problems

    patches = [*PATCHES, *(patch for patch in LATER_PATCHES if exists(patch.symbol))]
    patches += [patch for patch in BRIDGE_PATCHES if patch.module in sys.modules]
    patches = [patch for patch in patches if not patch.is_repaired()]
    if problems := _problems(patches) + relied_on_problems():
        raise IncompatibleMegatronError(problems)
    if exists(V2_FLAG):
        v2_patches = [patch for patch in V2_PATCHES if not patch.is_repaired()]
        PATCHED.v2_problems = _problems(v2_patches) + v2_problems()
        if PATCHED.v2_problems:
            logger.warning("Megatron-FSDP v2 is refused: %s", " ".join(PATCHED.v2_problems))
        else:
            patches += v2_patches
    apply_all(patches)
    PATCHED.applied = patches
    PATCHED.waiting = [patch for patch in BRIDGE_PATCHES if patch not in patches]
    warn_where_untested(installed_versions())


def _problems(patches: list[Patch]) -> list[str]:
    return [problem for patch in patches for problem in patch.problems()]


def disable() -> None:
    """Revert the patches of ``enable()``; do nothing if it was not called.

    Raises:
        RuntimeError: A target was wrapped again since; nothing was restored.
    """
    revert_all(PATCHED.applied)
    PATCHED.applied, PATCHED.waiting = [], []


def is_enabled() -> bool:
    """Return whether ``enable()`` was called."""
    return bool(PATCHED.applied)


def num_patches() -> int:
    """Return the number of patches that are applied."""
    return len(PATCHED.applied)
