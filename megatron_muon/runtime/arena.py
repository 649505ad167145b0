# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that exists while a step runs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.tensors import local_tensor


@contextmanager
def allocating(num_bytes: int, device: torch.device, purpose: str) -> Iterator[None]:
    """Raise an error with sizes where the body cannot allocate.

    Args:
        num_bytes: Memory that the body needs.
        device: Where it is allocated.
        purpose: Contents of the memory.

    Raises:
        MemoryError: The device has too little memory.
    """
    try:
        yield
    # A GPU raises torch.OutOfMemoryError, which is one of these; a CPU nothing more special.
    except RuntimeError as error:
        text = (
            f"expected {num_bytes:,} bytes on {device} for {purpose}, got "
            f"{type(error).__name__}: {first_line(error)}"
        )
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            text += f"; {free:,} of {total:,} bytes are free on {device}"
        raise MemoryError(text) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed, which torch reports as a RuntimeError on a CPU."""
    texts = ("out of memory", "allocate memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


class Arena:
    """One block of memory whose views outlive it.

    Views are made once, at construction: in a step the host would make them before every copy.
    They may be used between :meth:`allocate` and :meth:`free`. Between steps the memory belongs to
    the allocator, and a forward pass can use it.

    Freeing by the size of the storage is what FSDP2 does with its all-gathered parameters.
    Source: torch 2.11, torch/distributed/fsdp/_fully_shard/_fsdp_common.py.

    Args:
        num_bytes: Size.
        device: Where it is allocated.
        purpose: Contents, for errors.

    Raises:
        MemoryError: The device has too little memory, with sizes.

    Memory: ``num_bytes``, allocated once at construction to show that it is there, and then while
        a step runs.
    """

    def __init__(self, num_bytes: int, device: torch.device, purpose: str) -> None:
        self.num_bytes = num_bytes
        with allocating(num_bytes, device, purpose):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def view(self, offset: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """View elements from a byte on, ``(num_elements,)``."""
        return self._memory[offset : offset + num_elements * dtype.itemsize].view(dtype)

    def allocate(self) -> None:
        """Allocate the memory; its contents are undefined."""
        storage = self._memory.untyped_storage()
        # If a step ended early it is still there: torch would move it to another address.
        if storage.nbytes() != self.num_bytes:
            storage.resize_(self.num_bytes)

    def free(self) -> None:
        """Return the memory. Collectives must have been waited for."""
        # Deleting the tensor would not free it: every view keeps the memory.
        self._memory.untyped_storage().resize_(0)


class OtherBytes(NamedTuple):
    """Memory that the step of another optimizer allocates on a device, bytes.

    Args:
        state: State that does not exist yet, and stays.
        temporaries: Returned before its step ends.
    """

    state: int = 0
    temporaries: int = 0


NOTHING = OtherBytes()


def elementwise_bytes(
    optimizers: Iterable[torch.optim.Optimizer], device: torch.device
) -> OtherBytes:
    """Return the memory of the next step of torch's Adam and of Lion, one after the other.

    Temporaries are those of the largest group, or of the largest parameter where parameters are
    stepped one by one. Fused kernels have none.
    """
    needs = [_elementwise_bytes(optimizer, device) for optimizer in optimizers]
    return OtherBytes(
        sum(need.state for need in needs), max((need.temporaries for need in needs), default=0)
    )


def _elementwise_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> OtherBytes:
    """Return the memory of the next step of one optimizer.

    Source: torch 2.15, torch/optim/adam.py, _single_tensor_adam and _multi_tensor_adam.
    """
    is_adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    new_state, temporaries = 0, 0
    for group in optimizer.param_groups:
        sizes = {
            param: local.nbytes
            for param in group["params"]
            if param.grad is not None and (local := local_tensor(param)).device == device
        }
        num_states = 2 + group["amsgrad"] if is_adam else 1
        new_state += num_states * sum(sizes[p] for p in sizes if not optimizer.state.get(p))
        if not sizes or group.get("fused"):
            continue
        # torch's default for DTensors is one by one.
        foreach = group.get("foreach", True)
        if foreach is None:
            foreach = not isinstance(next(iter(sizes)), DTensor)
        is_copied = is_adam and (
            group["maximize"] or (group["weight_decay"] and not group.get("decoupled_weight_decay"))
        )
        # One by one, temporaries of the parameter before are still there.
        unit, num = (sum(sizes.values()), 1) if foreach else (max(sizes.values()), 3)
        temporaries = max(temporaries, unit * (num + 2 * bool(is_copied)))
    return OtherBytes(new_state, temporaries)
