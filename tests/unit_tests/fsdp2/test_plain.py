# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plain tensors that cannot be stepped; ``test_layouts.py`` steps those that can."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.device import device, init_group
from helpers.ranks import run_ranks

from megatron_muon.fsdp2 import ExchangeSettings, Muon


def _refusals() -> dict[str, str]:
    """Return what is said of plain tensors that cannot be stepped."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_group()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    world = dist.group.WORLD

    def plain(**marks: Any) -> Any:
        param = torch.nn.Parameter(torch.ones(4, 4, device=device()))
        for name, value in marks.items():
            setattr(param, name, value)
        return param

    mesh = init_device_mesh(device().type, (2,))
    sharded = torch.nn.Parameter(
        distribute_tensor(torch.ones(4, 4, device=device()), mesh, [Shard(0)])
    )
    channels_last = torch.nn.Parameter(
        torch.ones(4, 3, 2, 2, device=device()).to(memory_format=torch.channels_last)
    )
    # This rank's row is the job, and its column too: no grid.
    cases: dict[str, Callable[[], Any]] = {
        "no_group": lambda: Muon([("w", plain())]),
        "no_blocks": lambda: Muon([("w", plain(partition_dim=0))], process_group=world),
        "mixed": lambda: Muon([("w", plain()), ("v", sharded)], process_group=world),
        "grid": lambda: Muon([("w", plain())], process_group=world, tensor_group=world),
        "one_rank": lambda: Muon(
            [("w", plain())], process_group=world if dist.get_rank() == 0 else None
        ),
        "stride": lambda: Muon(
            [{"params": [("w", plain(partition_dim=0, partition_stride=2))], "split_sizes": 2}],
            tensor_group=world,
        ),
        "flatten": lambda: Muon(
            [{"params": [("w", channels_last)], "flatten": True}], process_group=world
        ),
        "no_flatten": lambda: Muon([("w", channels_last)], process_group=world),
        "not_bool": lambda: Muon([{"params": [("v", sharded)], "flatten": 1}]),
        "function": lambda: Muon([("v", sharded)], newton_schulz="fast"),
        "function_dtype": lambda: Muon(
            [("v", sharded)],
            newton_schulz=torch.clone,
            exchange=ExchangeSettings(comm_dtype="bf16"),
        ),
        "function_form": lambda: Muon(
            [("v", sharded)],
            newton_schulz=torch.clone,
            exchange=ExchangeSettings(newton_schulz="gram"),
        ),
        "momentum": lambda: Muon([("v", sharded)], momentum_dtype=torch.float16),
    }
    assert alone is not None
    said = {}
    for name, build in cases.items():
        try:
            build()
            said[name] = "no error"
        except RuntimeError as error:
            said[name] = str(error)
    return said


@pytest.mark.ranks
def test_invalid_plain_tensors_are_refused_on_all_ranks():
    """Never a silent WORLD: a sentence each."""
    expected = {
        "no_group": "w: expected a DTensor in a job of 2 ranks, got a plain tensor",
        "no_blocks": "w: expected tensor_group with a partition_dim of 0, got none",
        "mixed": "v: expected plain tensors with process_group or tensor_group, got a DTensor",
        "grid": "process_group, tensor_group: expected ranks in a grid",
        "one_rank": "rank 0: process_group, tensor_group: expected ranks in a grid",
        "stride": "w: split_sizes: expected none with a partition_stride of 2",
        "flatten": "w: flatten: expected a contiguous tensor",
        "no_flatten": "set flatten=True in the group of a convolution",
        "not_bool": "v: flatten: expected True or False, got 1",
        "function": "newton_schulz: expected a function of a stack, got 'fast'",
        "function_dtype": "exchange.comm_dtype: expected fp32 for Newton-Schulz in fp32",
        "function_form": "newton_schulz: expected a function of a stack",
        "momentum": "momentum_dtype: expected one of [torch.float32, torch.bfloat16]",
    }
    for said in run_ranks(2, _refusals).check().results:
        assert set(said) == set(expected)
        for name, text in expected.items():
            assert text in said[name], said[name]
