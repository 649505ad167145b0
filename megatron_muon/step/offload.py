# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer state, and main weights, in CPU memory between steps."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.arena import allocating
from megatron_muon.runtime.tensors import local_tensor


class Offload:
    """Keep tensors in CPU memory between steps, when a model needs the memory of the device.

    Tensors stay the same objects, on other memory: whoever reads one between steps, as a save does,
    gets its value from CPU memory. A storage that is resized to no bytes would serve all views at
    once, but let such a reader fail with an illegal access.

    Args:
        tensors: Returns all tensors that move, and all others that share memory with them. Scalars
            stay, and so does what a user keeps in CPU memory beside a GPU.
        device: Device of a step.
        fraction: Largest share of the bytes that moves, allocation by allocation, in the order of
            the tensors; 0 moves nothing.

    Attributes:
        problems: Errors of this rank, as sentences: ranks agree on them before the next step.

    Memory: the bytes that move, pinned beside a GPU; torch rounds allocations of pinned memory up
        to powers of two. It stays while a step runs.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
        fraction: float = 1.0,
    ) -> None:
        self._tensors, self._device, self._fraction = tensors, device, fraction
        self.problems: list[str] = []
        # What is in CPU memory, by its address: tensors, and the memory.
        self._away: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        # CPU memory of what is on the device, by the address there.
        self._memory: dict[int, torch.Tensor] = {}

    def to_device(self) -> None:
        """Copy to the device, before a step; what does not fit stays in CPU memory."""
        try:
            for address, (views, memory) in tuple(self._away.items()):
                with allocating(memory.numel(), self._device, "state in CPU memory"):
                    own = torch.empty(memory.numel(), dtype=torch.uint8, device=self._device)
                _place(views, own.copy_(memory, non_blocking=True))
                self._memory[own.data_ptr()] = memory
                del self._away[address]
        # Any error: other ranks wait for this one.
        except Exception as error:
            self.problems.append(first_line(error))

    def to_cpu(self) -> None:
        """Copy to CPU memory, after a step or a load; the host waits, as it may read there."""
        self.problems.clear()
        if not self._fraction:
            return
        storages: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in map(local_tensor, self._tensors()):
            # Not its elements: an empty shard keeps the memory of its buffer, too.
            if tensor.dim() and tensor.untyped_storage().nbytes():
                views = storages.setdefault(tensor.untyped_storage().data_ptr(), {})
                # A view keeps its base.
                views |= {id(each): each for each in (tensor, tensor._base) if each is not None}
        # State may have been removed, or replaced.
        self._away = {key: value for key, value in self._away.items() if key in storages}
        own = {
            address: views
            for address, views in ((key, [*by_id.values()]) for key, by_id in storages.items())
            if address in self._away or views[0].device.type == self._device.type
        }
        sizes = {address: views[0].untyped_storage().nbytes() for address, views in own.items()}
        rest = self._fraction * sum(sizes.values())
        try:
            for address, num_bytes in sizes.items():
                if num_bytes > rest:
                    continue
                rest -= num_bytes
                if address not in self._away:
                    self._move(own[address], self._memory.get(address), num_bytes)
        # Most likely the memory cannot be pinned.
        except Exception as error:
            self.problems.append(f"CPU memory for state: {first_line(error)}")
        self._memory.clear()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _move(
        self, views: Sequence[torch.Tensor], memory: torch.Tensor | None, num_bytes: int
    ) -> None:
        if memory is None or memory.numel() != num_bytes:
            is_cuda = self._device.type == "cuda"
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        own = views[0].as_strided((num_bytes // views[0].itemsize,), (1,), 0)
        _place(views, memory.copy_(own.view(torch.uint8), non_blocking=True))
        self._away[memory.data_ptr()] = [*views], memory


def as_announced(value: Any) -> Any:  # noqa: ANN401 - of a state
    """Return a DTensor that announces the device where its shard is now; other values unchanged.

    torch's ``full_state_dict`` moves what is in CPU memory to the mesh, and asks the DTensor.
    """
    if not isinstance(value, DTensor) or value.device == value._local_tensor.device:
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=False)


def _place(views: Iterable[torch.Tensor], memory: torch.Tensor) -> None:
    """Let tensors view other memory, each as it viewed the memory before."""
    for view in views:
        layout = view.size(), view.stride(), view.storage_offset()
        view.data = memory.view(view.dtype).as_strided(*layout)
