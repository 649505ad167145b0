# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run all measurements that fit a machine, or print the tables of folders."""

import sys
from pathlib import Path

# Python puts this folder there, where a package cannot import itself.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from evidence.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
