# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Apply the patches to the installed megatron-core, and revert them."""

from megatron_muon.mcore.patching import PATCHED
from megatron_muon.mcore.versions import IncompatibleMegatronError, check_versions

# Importing this module imports no megatron: ``megatron_muon`` exports its functions.


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
        from megatron_muon.mcore.patches import PATCHES
    except ImportError as error:
        problem = f"megatron-core: expected the names that Muon imports, found {error}."
        raise IncompatibleMegatronError([problem]) from error
    PATCHED.known = PATCHES
    PATCHED.update()


def disable() -> None:
    """Revert the patches of ``enable()``; do nothing if it was not called."""
    PATCHED.revert()


def is_enabled() -> bool:
    """Return whether ``enable()`` was called."""
    return bool(PATCHED.applied)
