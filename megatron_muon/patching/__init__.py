# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Change a package at run time: explicit, verified before anything is applied, reversible.

This folder knows nothing of Muon. The patches are listed in ``megatron_muon/mcore/patches.py``.
"""

from megatron_muon.patching.packages import check_packages
from megatron_muon.patching.versions import IncompatibleMegatronError

__all__ = ["IncompatibleMegatronError", "check_packages"]
