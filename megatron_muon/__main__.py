# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Start the launcher: ``torchrun ... -m megatron_muon SCRIPT [ARGS...]``."""

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from megatron_muon import cpu_ranks
from megatron_muon.launcher import run

if __name__ == "__main__":
    try:
        # torchrun then ends with what the rank that failed first has to say.
        status = record(run)(sys.argv[1:]) or 0
    except SystemExit as error:
        # Megatron ends so after --exit-interval.
        if error.code:
            raise
        status = 0
    if cpu_ranks.is_enabled():
        cpu_ranks.end_process(status)
    sys.exit(status)
