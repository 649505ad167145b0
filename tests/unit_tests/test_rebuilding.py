# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Restarts in one process: build, step, drop and build again, with new process groups."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from helpers.device import init_group
from helpers.fsdp2_models import small_model, step
from helpers.ranks import run_ranks
from helpers.toy_fsdp import build_gpt, build_optimizer, run_backward, wrap_gpt
from helpers.toy_gpt import slow

pytestmark = [pytest.mark.ranks, pytest.mark.cpu_only]


def _of_fsdp2() -> None:
    from megatron_muon.fsdp2 import MuonAdamW

    for options in ({"adaptive": "normuon"}, {"optimizer_class": "soap"}):
        model = small_model(is_sharded=True)
        optimizer = MuonAdamW.from_model(model, lr=0.1, **options)
        step(model, optimizer, 0)
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer, 1)


def _of_megatron() -> None:
    from megatron.core import parallel_state

    import megatron_muon

    # Again and again: patches do not stack.
    megatron_muon.enable()
    parallel_state.initialize_model_parallel()
    for settings in ({}, {"optimizer": "soap"}):
        model = wrap_gpt(build_gpt(), "optim_grads_params")
        optimizer = build_optimizer(model, **settings)
        for number in range(2):
            optimizer.zero_grad()
            run_backward(model, number)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        # The collector does not see them: torch does not show it what hooks refer to, here the
        # model (patches/README.md).
        for handle in model.module.grad_acc_hooks.values():
            handle.remove()
    parallel_state.destroy_model_parallel()


def _counts() -> dict[str, int]:
    """Count what a dropped optimizer, or its groups, could leave behind."""
    gc.collect()
    kinds = list(map(type, gc.get_objects()))
    counts = {f"{kind.__module__}.{kind.__qualname__}": 0 for kind in kinds}
    for kind in kinds:
        counts[f"{kind.__module__}.{kind.__qualname__}"] += 1
    from megatron_muon.mcore.patching import PATCHED

    return {
        **{name: n for name, n in counts.items() if name.startswith(("megatron", "torch."))},
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "patched names": len(PATCHED._replaced),
    }


def _rebuild(name: str, num_cycles: int) -> list[dict[str, int]]:
    """Return the counts after the third cycle and after the last one."""
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for number in range(num_cycles):
        # Ranks of an earlier cycle left addresses in the store.
        init_group(store=dist.PrefixStore(str(number), store), rank=rank, world_size=world_size)
        {"FSDP2": _of_fsdp2, "Megatron-FSDP": _of_megatron}[name]()
        dist.destroy_process_group()
        if number in (2, num_cycles - 1):
            found.append(_counts())
    return found


@pytest.mark.parametrize("num_cycles", [5, slow(50)])
@pytest.mark.parametrize(
    "name", ["FSDP2", pytest.param("Megatron-FSDP", marks=pytest.mark.megatron)]
)
def test_nothing_is_left_of_what_was_dropped(name, num_cycles):
    """An optimizer that was dropped leaves objects, threads or groups, which add up by restarts."""
    for first, last in run_ranks(2, _rebuild, name, num_cycles, timeout_s=900.0).check().results:
        assert {key: n for key, n in last.items() if n != first.get(key)} == {}
