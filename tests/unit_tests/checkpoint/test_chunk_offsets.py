# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Offsets of shards that ranks gather together are the ones that upstream gathers one by one."""

from typing import Any

import pytest
import torch.distributed as dist
from helpers.checkpoint_runs import after_enable, wrap
from helpers.ranks import launch
from helpers.toy_gpt import BF16, EP, HFSDP, PP, TP, ZERO, fsdp_toy_gpt, slow
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.ranks


def _compare() -> None:
    after_enable(_compare_offsets)


def _compare_offsets() -> None:
    """Let a save compare its offsets with upstream's, and print how many gathers it needs."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.training import checkpointing

    number = 0

    def gather(original: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal number
        number += 1
        original(*args, **kwargs)

    def prepare(original: Any, *args: Any) -> Any:
        nonlocal number
        number = 0
        prepared = original(*args)
        needed = number
        keys = uneven_dtensor.filter_unflattened_state_dict(
            prepared, visit_condition=lambda value: isinstance(value, DTensor)
        )
        for key in sorted(keys):
            tensor = uneven_dtensor.get_unflattened_state_dict(prepared, key)
            (chunk,) = tensor._local_tensor.__create_chunk_list__()
            assert chunk == uneven_dtensor.gather_and_compute_chunk_metadata(tensor), key
        print(f"gathers: {needed} for {len(keys)} tensors", flush=True)
        return prepared

    wrap(dist, "all_gather_object", gather)
    wrap(checkpointing, "preprocess_fsdp_dtensor_state_dict", prepare)


@pytest.mark.parametrize(
    ("world_size", "zero", "flags", "expected"),
    [
        pytest.param(3, 3, (*BF16, "--swiglu", "--global-batch-size", "3"), 1, id="zero3_gated"),
        slow(2, 0, ("--optimizer", "adam"), 0, id="zero0_adam"),
        slow(8, 3, (*HFSDP, *TP, "--swiglu"), 3, id="hfsdp_tp2_gated"),
        slow(4, 2, (*EP, *TP, "--sequence-parallel"), 4, id="ep2_tp2"),
        slow(4, 1, (*PP, *BF16, "--optimizer", "soap"), 1, id="stages_soap"),
    ],
)
def test_offsets_are_upstreams(world_size, zero, flags, expected, tmp_path):
    """A save gathers offsets for each group of ranks, not for each tensor, and they are right."""
    arguments = (*flags, "--train-iters", "1", "--lr-decay-iters", "20", "--save-interval", "1")
    arguments = (*arguments, "--save", str(tmp_path))
    run = launch(world_size, fsdp_toy_gpt(ZERO[zero], *arguments), before=_compare).check()
    for output in run.outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("gathers: ")]
        needed, tensors = (int(word) for word in line.split() if word.isdigit())
        assert needed == expected and tensors > 10
