# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train the same short runs with whatever megatron is first on the path.

Called as a script, in a process of its own, since a process imports one megatron: prints what
:func:`train_all` returns as JSON.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers.fused_linear import fuse_linears_of_each_model
from helpers.ranks import launch
from helpers.toy_gpt import EP, HFSDP, INTERLEAVED, NO_MATRIX, PP, TP, fsdp_toy_gpt

FEW = ("--train-iters", "4", "--lr-decay-iters", "20", "--global-batch-size", "8")
# Ranks and flags. Several microbatches an iteration, over one inner rank or two under HFSDP and
# over one rank of experts, and gradients that are clipped: all that the repairs change.
RUNS = {
    "hfsdp": (4, HFSDP),
    "hfsdp_adam_one_inner_rank": (2, (*HFSDP, "--optimizer", "adam", "--clip-grad", "0.1")),
    "experts_over_one_rank": (2, EP),
    "stages_hfsdp": (4, (*PP, *HFSDP)),
    "stages_tensor_parallel_without_layer": (4, (*NO_MATRIX, *TP)),
    "stages_interleaved": (2, (*INTERLEAVED, "--train-iters", "1")),
}


def train_all() -> dict[str, Any]:
    """Train each run, and one that is saved and resumed.

    Returns:
        Unrounded losses and gradient norms by name of the run, what rank 0 logged of the patches,
        and the number of files that were saved.
    """
    history, outputs = {}, []
    for name, (world_size, flags) in RUNS.items():
        run = launch(world_size, fsdp_toy_gpt("optim_grads_params", *FEW, *flags)).check()
        history[name] = run.history
        outputs.append(run.outputs[0])
    # Over several microbatches, in a buffer that holds their sum.
    fused = launch(2, fsdp_toy_gpt("optim", *FEW), before=fuse_linears_of_each_model)
    history["fused"] = fused.check().history
    with tempfile.TemporaryDirectory() as folder:
        save = ("--save", folder, "--save-interval", "2")
        for name, load in (("saved", ()), ("resumed", ("--load", folder, "--ckpt-step", "2"))):
            flags = fsdp_toy_gpt("optim_grads_params", *FEW, *save, *load, "--bf16")
            history[name] = launch(2, flags).check().history
        files = sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*"))
    patches = [line for line in outputs[0].splitlines() if "--list-patches" in line]
    return {"history": history, "patches": patches, "num_files": len(files)}


if __name__ == "__main__":
    json.dump(train_all(), sys.stdout)
