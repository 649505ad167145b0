# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Dtype and device of momentum between steps, and float32 copies of bfloat16 parameters.

Momentum in CPU memory is copied to the device in portions of a step, into staging memory. Without a
float32 copy, rounding a bfloat16 parameter would lose most of each update.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.arena import Arena
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


class CopyBack:
    """Copies of new momentum from staging memory to the memory where it is kept.

    Into CPU memory they run on a stream of their own: beside the copy of the next portion to the
    device, which a link can do at the same time, and the last ones beside the exchange.

    Args:
        device: Of the staging memory.
        to_cpu: Whether momentum is kept in CPU memory.

    Attributes:
        num_slots: Slots of staging memory, which portions use in turn.

    Memory: for bfloat16 momentum in CPU memory 2 bytes an element of each portion in flight.
    """

    def __init__(self, device: torch.device, *, to_cpu: bool) -> None:
        is_beside = to_cpu and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_beside else None
        self.num_slots = 2 if is_beside else 1
        self._device = device
        # By slot of staging memory, the end of its last copy, and memory that it reads.
        self._in_flight: dict[int, tuple[torch.cuda.Event, list[torch.Tensor]]] = {}

    def start(self, slot: int, kept: list[torch.Tensor], staged: list[torch.Tensor]) -> None:
        """Copy, rounded to the dtype of the kept momentum.

        Args:
            slot: Slot of the staging memory.
            kept: Momentum where it is kept.
            staged: Same shapes, float32.
        """
        if self._stream is None:
            torch._foreach_copy_(kept, staged, non_blocking=True)
            return
        # Converted on the current stream: memory was reserved for this stream only.
        sources = [new.to(old.dtype) for new, old in zip(staged, kept, strict=True)]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(kept, sources, non_blocking=True)
            self._in_flight[slot] = self._stream.record_event(), sources

    def wait(self, slot: int) -> None:
        """Let the current stream wait until a slot of staging memory may be overwritten."""
        if slot in self._in_flight:
            end, _ = self._in_flight.pop(slot)
            torch.cuda.current_stream(self._device).wait_event(end)

    def wait_for_all(self) -> None:
        """Let the current stream wait for all copies."""
        for slot in tuple(self._in_flight):
            self.wait(slot)


class MainParams:
    """Float32 copies of bfloat16 parameters, in the state of an optimizer.

    A parameter equals its rounded copy unless it was modified outside of a step, as by loading
    weights. Version counters do not detect that: ``dcp.load``, ``.data``, ``torch._foreach_mul_``
    of DTensors and collectives do not increment them, neither of a DTensor nor of its local tensor.
    So every step compares all elements, in a few launches.

    Args:
        params: All parameters; float32 ones need no copy.
        arena: Memory of a step, 4 bytes a local element of these parameters or more, in which
            nothing is kept between ``compare()`` and ``follow()``.

    Attributes:
        params: Parameters with a copy.

    Memory: 4 bytes per local element of a bfloat16 parameter.
    """

    def __init__(self, params: Sequence[torch.Tensor], arena: Arena) -> None:
        self.params = [param for param in params if param.dtype != torch.float32]
        self._arena = arena
        self._is_changed: torch.Tensor | None = None
        shards = [local_tensor(param) for param in self.params]
        arena.allocate()
        self._all_rounded = arena.view(0, sum(map(torch.numel, shards)), torch.bfloat16)
        parts = self._all_rounded.split([shard.numel() for shard in shards])
        self._rounded = [part.view(shard.shape) for part, shard in zip(parts, shards, strict=True)]
        arena.free()

    def create(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add the copies that are missing."""
        for param in self.params:
            if MAIN_PARAM not in state[param]:
                state[param][MAIN_PARAM] = param.detach().float()

    def _tensors(self, state: Mapping[torch.Tensor, Any]) -> tuple[list[Any], list[Any]]:
        """Return local tensors of parameters and copies."""
        mains = [local_tensor(state[param][MAIN_PARAM]) for param in self.params]
        return [local_tensor(param) for param in self.params], mains

    def compare(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Find out on the device whether an element has changed, in the arena of the step.

        Called before ranks agree to step: the host is then ahead of the device.

        Raises:
            MemoryError: The device has too little memory.
        """
        params, mains = self._tensors(state)
        self._arena.allocate()
        torch._foreach_copy_(self._rounded, mains)
        # 0 if and only if both are equal: bfloat16 has the difference of its smallest steps.
        torch._foreach_sub_(self._rounded, params)
        self._is_changed = self._all_rounded.any()

    def follow(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Copy elements that were changed since the last step.

        Called after ranks have agreed to step, when the host has waited for the device. Nothing is
        allocated on a GPU.
        """
        if self._is_changed is None:
            self.compare(state)
        if self._is_changed.item():  # type: ignore[union-attr]
            for own, main, difference in zip(*self._tensors(state), self._rounded, strict=True):
                memory = self._arena.view(self._all_rounded.nbytes, own.numel(), torch.bool)
                changed = torch.ne(difference, 0, out=memory.view(own.shape))
                # Sums with -0.0 have the bits of the other term.
                main.masked_fill_(changed, -0.0)
                main.add_(difference.copy_(own).masked_fill_(changed.logical_not_(), -0.0))
        self._is_changed = None

    def install(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Round the copies into the parameters, after a step."""
        torch._foreach_copy_(*self._tensors(state))
