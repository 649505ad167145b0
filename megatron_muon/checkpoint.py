# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m megatron_muon.checkpoint``."""

import sys

from megatron_muon.tools.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
