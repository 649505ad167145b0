# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Where momentum is between steps, and in which dtype.

Momentum in CPU memory is copied to the device in chunks of a step, into staging memory.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.dtensor_layout import local_tensor


def place_momentum(
    state: Mapping[torch.Tensor, dict[str, Any]], dtype: torch.dtype, *, in_cpu_memory: bool
) -> list[str]:
    """Convert the momentum of a state, which torch makes and loads like its parameter.

    Returns:
        What is wrong, as sentences.
    """
    for of_param in state.values():
        if "momentum_buffer" not in of_param:
            continue
        of_param["momentum_buffer"] = of_param["momentum_buffer"].to(dtype)
        if in_cpu_memory:
            try:
                of_param["momentum_buffer"] = _in_cpu_memory(of_param["momentum_buffer"])
            except RuntimeError as error:
                reason = first_line(error)
                return [f"offload_momentum: expected CPU memory that can be pinned, got {reason}"]
    return []


def wait_for_copies(device: torch.device) -> None:
    """Wait until a step's copies have arrived: whoever reads the state then must find them."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _in_cpu_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in CPU memory, pinned where it comes from a GPU; itself if it is there.

    Of a DTensor only the local tensor moves, as FSDP2's ``CPUOffloadPolicy`` does with parameters:
    mesh and placements stay those of the device. Source: torch 2.15,
    torch/distributed/fsdp/_fully_shard/_fsdp_common.py, _from_local_no_grad.
    """
    local = local_tensor(tensor)
    if local.device.type == "cpu":
        return tensor
    memory = torch.empty(local.shape, dtype=local.dtype, pin_memory=True)
    memory.copy_(local)
    if not isinstance(tensor, DTensor):
        return memory
    return DTensor(memory, tensor._spec, requires_grad=False)
