# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a script by the launcher of megatron_muon, on CPU ranks over gloo."""

import sys
from pathlib import Path

# Python puts this folder there, where a package cannot import itself.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cpu_ranks import enable, end_process  # noqa: E402
from megatron_muon.launcher import launch  # noqa: E402

if __name__ == "__main__":
    end_process(launch(sys.argv[1:], enable_cpu_ranks=enable))
