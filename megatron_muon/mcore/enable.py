# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Apply the patches to the installed megatron-core, and revert them."""

import logging
from collections.abc import Sequence

from megatron_muon.patching.packages import check_packages
from megatron_muon.patching.patch import Patch, apply_all, revert_all, verify_all
from megatron_muon.patching.versions import (
    IncompatibleMegatronError,
    installed_versions,
    warn_where_untested,
)

logger = logging.getLogger(__name__)

# Importing this module imports no megatron: ``megatron_muon`` exports its functions.
_applied: list[Patch] = []
_carried: list[Patch] = []


def enable() -> None:
    """Patch the installed megatron-core so that Muon runs under Megatron-FSDP.

    Calling it again does nothing. All targets are verified before the first is changed. A megatron
    whose source carries the same changes (``scripts/apply_patches.sh``) is not changed.

    Raises:
        IncompatibleMegatronError: A version or target differs from the tested ones, or the source
            carries only some of the patches; nothing was changed.
    """
    if is_enabled():
        return
    check_packages()
    # Only now: it imports torch.
    from megatron_muon.runtime.dependencies import dependency_problems

    # Before megatron is imported, which may fail on what they lack.
    if problems := dependency_problems():
        raise IncompatibleMegatronError(problems)
    try:
        from megatron_muon.mcore.later_patches import LATER_PATCHES, V2_PATCHES
        from megatron_muon.mcore.patches import PATCHES
        from megatron_muon.mcore.requirements import REQUIREMENTS, V2_FLAG, V2_REQUIREMENTS
    except ImportError as error:
        problem = f"megatron-core: expected what Muon imports of it, found {error}."
        raise IncompatibleMegatronError([problem]) from error

    patches = [patch for patch in PATCHES if not patch.is_repaired()]
    later = [patch for patch in LATER_PATCHES if patch.target.exists()]
    of_v2 = V2_REQUIREMENTS if V2_FLAG.exists() else ()
    later += [patch for patch in V2_PATCHES if of_v2 and not patch.is_repaired()]
    carried = [patch for patch in patches if patch.is_in_tree()]
    if carried and len(carried) < len(patches):
        raise IncompatibleMegatronError(_half_patched(carried, patches))
    # Patches of later releases have no diff.
    patches = later if carried else [*patches, *later]
    verify_all([*(patch.target for patch in patches), *REQUIREMENTS, *of_v2])
    apply_all(patches)
    _applied.extend(patches)
    _carried.extend(carried)
    if carried:
        logger.debug("megatron's source carries the patches")
    warn_where_untested(installed_versions())


def disable() -> None:
    """Restore what :func:`enable` changed; do nothing if it was not called.

    A source tree keeps its patches until ``scripts/apply_patches.sh --revert``.

    Raises:
        RuntimeError: A target was wrapped again since; nothing was restored.
    """
    revert_all(_applied)
    _applied.clear()
    _carried.clear()


def is_enabled() -> bool:
    """Return whether :func:`enable` was called: patches are applied, or the source carries them."""
    return bool(_applied or _carried)


def changes() -> tuple[int, bool]:
    """Return how many changes are in effect, and whether megatron's own source carries them."""
    return len(_applied or _carried), not _applied


def _half_patched(carried: Sequence[Patch], patches: Sequence[Patch]) -> list[str]:
    missing = [patch.target.symbol for patch in patches if patch not in carried]
    found = [patch.target.symbol for patch in carried]
    return [
        f"megatron's source: expected all {len(patches)} changes of patches/ or none, found "
        f"{', '.join(found)} without {', '.join(missing)}. Run scripts/apply_patches.sh on it, "
        "with --revert for none."
    ]
