# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT as ``scripts/pretrain_gpt.py`` does, and time functions of Megatron's models.

The launcher runs it for ``training_step.py``. Rank 0 prints the processor time of its main thread
in each function by iteration: work of the host, without waits for messages. With
``TIMED_WITHOUT_PATCHES=1`` Megatron trains as it is installed.
"""

import os
import runpy
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRETRAIN_GPT = Path(__file__).resolve().parent.parent / "scripts" / "pretrain_gpt.py"
# install_optimized_model_weights() is a call of the second one, which Adam's step makes itself.
FUNCTIONS = ("finish_grad_sync", "copy_main_weights_to_model_weights", "start_param_sync")


def main() -> None:
    """Replace the functions by timed ones, then train."""
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
        ParamAndGradBuffer,
    )
    from megatron.training import training

    from megatron_muon.mcore.enable import disable

    if os.environ.get("TIMED_WITHOUT_PATCHES"):
        disable()
    seconds: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds up its time."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            seconds[name] += time.thread_time() - start
            return result

        return call

    models = DistributedDataParallel, TorchFullyShardedDataParallel, MegatronFSDP
    for owner in (*models, ParamAndGradBuffer):
        for name in FUNCTIONS:
            if name in vars(owner):
                setattr(owner, name, timed(name, getattr(owner, name)))
    train_step = training.train_step

    def one_step(*args: Any, **kwargs: Any) -> Any:
        seconds.clear()
        result = train_step(*args, **kwargs)
        if dist.get_rank() == 0:
            line = ", ".join(f"{name} {1e3 * seconds[name]:.3f}" for name in FUNCTIONS)
            print(f"host ms: {line}", flush=True)
        return result

    training.train_step = one_step
    runpy.run_path(str(PRETRAIN_GPT), run_name="__main__")


if __name__ == "__main__":
    main()
