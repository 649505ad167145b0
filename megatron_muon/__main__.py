# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Start the launcher: ``torchrun ... -m megatron_muon SCRIPT [ARGS...]``."""

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from megatron_muon.launcher import run

if __name__ == "__main__":
    # torchrun's summary then has the error of the rank that failed first.
    sys.exit(record(run)(sys.argv[1:]))
