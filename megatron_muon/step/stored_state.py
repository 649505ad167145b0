# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Dtype and device of momentum between steps, and float32 copies of bfloat16 parameters.

Momentum in CPU memory is copied to the device in chunks of a step, into staging memory. Without a
float32 copy, rounding a bfloat16 parameter would lose most of each update.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.arena import allocating
from megatron_muon.runtime.tensors import local_tensor

MAIN_PARAM = "main_param"


def place_momentum(
    state: Mapping[torch.Tensor, dict[str, Any]], dtype: torch.dtype, *, in_cpu_memory: bool
) -> None:
    """Convert the momentum of a state, which torch makes and loads like its parameter.

    Raises:
        RuntimeError: CPU memory cannot be pinned.
    """
    for values in state.values():
        if "momentum_buffer" not in values:
            continue
        values["momentum_buffer"] = values["momentum_buffer"].to(dtype)
        if in_cpu_memory:
            try:
                values["momentum_buffer"] = _in_cpu_memory(values["momentum_buffer"])
            except RuntimeError as error:
                raise RuntimeError(
                    "offload_momentum: expected CPU memory that can be pinned, got "
                    f"{first_line(error)}"
                ) from error


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


class MainParams:
    """Float32 copies of bfloat16 parameters, in the state of an optimizer.

    Args:
        params: All parameters; float32 ones need no copy.

    Attributes:
        params: Parameters with a copy.

    Memory: 4 bytes per local element of a bfloat16 parameter.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = [param for param in params if param.dtype != torch.float32]

    def create(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add the copies that are missing."""
        for param in self.params:
            if MAIN_PARAM not in state[param]:
                state[param][MAIN_PARAM] = param.detach().float()

    def follow(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Copy elements that were changed since the last step, as by loading weights.

        Such an element is not its copy rounded. Versions of tensors do not tell: those of DTensors
        stay. Called before ranks agree to step, as it needs memory.

        Raises:
            MemoryError: The device has too little memory, with sizes.

        Memory: 7 bytes an element of the largest parameter.
        """
        for param in self.params:
            own, main = local_tensor(param), local_tensor(state[param][MAIN_PARAM])
            with allocating(7 * own.numel(), own.device, "the comparison of a weight"):
                main.copy_(torch.where(main.to(own.dtype) == own, main, own))

    def install(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Round the copies into the parameters, after a step."""
        torch._foreach_copy_(
            [local_tensor(param) for param in self.params],
            [local_tensor(state[param][MAIN_PARAM]) for param in self.params],
        )
