# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Dtype and device of momentum between steps, and float32 copies of bfloat16 parameters.

Without a float32 copy, rounding a bfloat16 parameter would lose most of each update.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import TensorList

MAIN_PARAM = "main_param"


def placed_momentum(
    momentum: torch.Tensor, dtype: torch.dtype, *, in_cpu_memory: bool
) -> torch.Tensor:
    """Return momentum in its dtype and memory; torch makes and loads it like its parameter.

    In CPU memory it is pinned where it comes from a GPU. Of a DTensor only the local tensor moves,
    as FSDP2's ``CPUOffloadPolicy`` does with parameters: mesh and placements stay those of the
    device. Source: torch 2.15, torch/distributed/fsdp/_fully_shard/_fsdp_common.py,
    _from_local_no_grad.

    Raises:
        RuntimeError: CPU memory cannot be pinned.
    """
    momentum = momentum.to(dtype)
    local = local_tensor(momentum)
    if not in_cpu_memory or local.device.type == "cpu":
        return momentum
    try:
        memory = torch.empty(local.shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"offload_momentum: expected CPU memory that can be pinned, got {first_line(error)}"
        ) from error
    memory.copy_(local)
    if not isinstance(momentum, DTensor):
        return memory
    return DTensor(memory, momentum._spec, requires_grad=False)


def tensors_in(arena: Arena, offset: int, shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
    """View consecutive float32 tensors in an arena, from a byte on."""
    sizes = list(map(math.prod, shapes))
    parts = arena.view(offset, sum(sizes), torch.float32).split(sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class MomentumStaging:
    """Float32 memory of the device for momentum that is kept in bfloat16 or in CPU memory.

    A step loads, averages and stores it in portions. Copies into CPU memory run on a stream of
    their own, beside the load of the next portion, as a link carries both directions at once.
    Therefore portions use two slots in turn. ``wait()`` follows the last portion.

    Args:
        portions: Shapes of tensors by portion.
        dtype: Dtype in which momentum is kept.
        in_cpu_memory: Whether it is kept in CPU memory.
        device: Device of the float32 memory.

    Attributes:
        is_needed: Whether momentum is kept otherwise than as float32 on the device.
        tensors: Float32 tensors by portion; none if they are not needed.
        converted_bytes: Memory that torch allocates to convert momentum, which only a device does.

    Memory: while a step runs, the float32 elements of the largest portion, by slot.
    """

    def __init__(
        self,
        portions: Sequence[Sequence[torch.Size]],
        dtype: torch.dtype,
        *,
        in_cpu_memory: bool,
        device: torch.device,
    ) -> None:
        self.is_needed = dtype != torch.float32 or in_cpu_memory
        self._in_cpu_memory, self._device = in_cpu_memory, device
        has_stream = in_cpu_memory and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if has_stream else None
        self._num_slots = 2 if has_stream else 1
        largest = max((sum(map(math.prod, shapes)) for shapes in portions), default=0)
        is_converted = in_cpu_memory and dtype != torch.float32
        self.converted_bytes = 2 * (self._num_slots + 1) * largest * is_converted
        num_bytes = 4 * largest
        self._arena = Arena(num_bytes * self._num_slots * self.is_needed, device, "momentum")
        self.tensors = [
            tensors_in(self._arena, number % self._num_slots * num_bytes, shapes)
            for number, shapes in enumerate(portions if self.is_needed else ())
        ]
        self._arena.free()
        # By slot, the end of its last copy, and the memory that the copy reads.
        self._in_flight: dict[int, tuple[torch.cuda.Event, TensorList]] = {}

    def allocate(self) -> None:
        """Allocate the memory, which stays until ``free()``.

        Raises:
            MemoryError: The device has too little memory, with sizes.
        """
        self._arena.allocate()

    def free(self) -> None:
        """Return the memory."""
        self._arena.free()

    def load(self, number: int, staged: TensorList, kept: TensorList) -> None:
        """Copy kept momentum of a portion into its slot."""
        self.wait(number % self._num_slots)
        torch._foreach_copy_(staged, kept, non_blocking=True)

    def store(self, number: int, staged: TensorList, kept: TensorList) -> None:
        """Copy new momentum of a portion back, rounded once."""
        if self._stream is None:
            torch._foreach_copy_(kept, staged, non_blocking=True)
            return
        # Converted on the current stream: memory was reserved for this stream only.
        sources = [new.to(old.dtype) for new, old in zip(staged, kept, strict=True)]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(kept, sources, non_blocking=True)
            self._in_flight[number % self._num_slots] = self._stream.record_event(), sources

    def wait(self, *slots: int) -> None:
        """Let the current stream wait for the last copies of slots; without one, for all copies."""
        for slot in slots or tuple(self._in_flight):
            if slot in self._in_flight:
                end, _ = self._in_flight.pop(slot)
                torch.cuda.current_stream(self._device).wait_event(end)

    def synchronize(self) -> None:
        """Let the host wait until momentum in CPU memory may be read or written."""
        self.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()


class MainParams:
    """Float32 copies of bfloat16 parameters, in the state of an optimizer.

    A step updates the copies, and rounds them into the parameters. Parameters that were changed
    outside of a step, as by loading weights, are read where a copy is stale: version counters do
    not detect a change (``dcp.load``, ``.data``, ``torch._foreach_mul_`` of DTensors and
    collectives do not increment them), and a comparison in every step costs a pass over all
    weights.

    Args:
        params: All parameters; float32 ones need no copy.

    Attributes:
        params: Parameters with a copy.
        are_stale: Whether the next step reads parameters that were changed: after construction, a
            load, or a user's call.

    Memory: 4 bytes per local element of a bfloat16 parameter.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = [param for param in params if param.dtype != torch.float32]
        self.are_stale = True

    def create(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add the copies that are missing."""
        for param in self.params:
            if MAIN_PARAM not in state[param]:
                state[param][MAIN_PARAM] = param.detach().float()
        self.are_stale = True

    def _tensors(self, state: Mapping[torch.Tensor, Any]) -> tuple[list[Any], list[Any]]:
        """Return local tensors of parameters and copies."""
        mains = [local_tensor(state[param][MAIN_PARAM]) for param in self.params]
        return [local_tensor(param) for param in self.params], mains

    def refresh(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Copy the elements of parameters that differ from their rounded copy, if it is stale.

        Called before ranks agree to step, as it allocates memory.
        """
        if self.are_stale:
            for own, main in zip(*self._tensors(state), strict=True):
                main.copy_(torch.where(main.to(own.dtype) == own, main, own))

    def install(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Round the copies into the parameters, after a step."""
        torch._foreach_copy_(*self._tensors(state))
        self.are_stale = False
