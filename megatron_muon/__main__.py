# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Start the launcher: ``torchrun ... -m megatron_muon SCRIPT [ARGS...]``."""

import sys

from megatron_muon.launcher import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
