# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check what is installed before megatron is imported."""

from megatron_muon.patching.errors import IncompatibleMegatronError
from megatron_muon.patching.transformer_engine import transformer_engine_problems
from megatron_muon.patching.versions import installed_versions, version_problems


def check_packages() -> None:
    """Check the versions of the packages, and that Transformer Engine is absent or whole.

    Megatron is not imported, so that it can be done before that would fail.

    Raises:
        IncompatibleMegatronError: A package is not one that the patches were written for.
    """
    problems = version_problems(installed_versions()) + transformer_engine_problems()
    if problems:
        raise IncompatibleMegatronError(problems)
