# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check on one GPU what only a GPU can show, in under 15 minutes; or the rest of it on a CPU.

    python3 scripts/gpu_checks.py --out DIR           # on a machine with a GPU
    .venv/bin/python scripts/gpu_checks.py --cpu      # what needs none, in a minute
    python3 scripts/gpu_checks.py --list

Any Python will do that finds torch, megatron-core and emerging-optimizers, on PYTHONPATH for
instance. Each check runs in a process of its own with a limit of time, and prints one line:
``passed``, ``failed`` with the reason, or ``not possible here`` with the reason. The exit status is
1 if any failed, and 2 if none could start. ``gpu_checks/`` has a file for each check.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This folder is on the path already: it is the script's.
sys.path[1:1] = [str(ROOT), str(ROOT / "tests" / "unit_tests")]

# The folder of this name, which Python prefers to this file.
from gpu_checks.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
