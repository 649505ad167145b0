# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the recipe of Megatron-Bridge several times in the same ranks.

    torchrun --nproc-per-node 2 tests/unit_tests/helpers/bridge_runs.py RUN RUN ...

A RUN has the arguments of the recipe in one string. Each prints a line ``RUN [losses]`` or ``RUN
error`` on every rank. Put a run that fails last: Megatron's globals stay as it left them.
"""

import importlib
import re
import sys
from pathlib import Path
from unittest import mock

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "recipes")]


def main() -> None:
    recipe = importlib.import_module("with_megatron_bridge")
    import torch.distributed as dist
    from cpu_ranks import end_process
    from megatron.bridge.training.utils import train_utils

    # Its groups stay for the next run.
    dist.init_process_group("gloo")
    for run in sys.argv[1:]:
        lines: list[str] = []
        with (
            mock.patch.object(train_utils, "print_rank_last", lines.append),
            mock.patch.object(sys, "argv", ["recipe", *run.split()]),
        ):
            try:
                recipe.train()
                result = str(re.findall(r"lm loss: ([\d.E+-]+)", " ".join(lines)))
            except Exception as error:
                result = f"{type(error).__name__}: {' '.join(str(error).split())}"
        sys.stdout.write(f"\nrank {dist.get_rank()}: {run}: {result}\n")
        sys.stdout.flush()
    end_process(0)


if __name__ == "__main__":
    main()
