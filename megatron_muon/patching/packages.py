# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check the installed packages before megatron is imported, which would fail with other errors."""

from megatron_muon.patching.versions import (
    IncompatibleMegatronError,
    installed_versions,
    version_problems,
)


def check_packages() -> None:
    """Check the versions of the packages.

    Raises:
        IncompatibleMegatronError: The patches were not written for a package.
    """
    if problems := version_problems(installed_versions()):
        raise IncompatibleMegatronError(problems)
