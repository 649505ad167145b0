# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that exists while a step runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatron_muon.runtime.agreement import first_line


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
    # A GPU raises torch.OutOfMemoryError, a subclass; a CPU raises a plain RuntimeError.
    except RuntimeError as error:
        # After another error a GPU may not answer how much memory is free.
        if not is_out_of_memory(error):
            raise
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
    They may be used between ``allocate()`` and ``free()``. Between steps the memory belongs to the
    allocator, and a forward pass can use it.

    FSDP2 frees its all-gathered parameters in the same way, by the size of the storage.
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
        self.num_bytes, self._purpose = num_bytes, purpose
        with allocating(num_bytes, device, purpose):
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def view(self, offset: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """View elements from a byte on, ``(num_elements,)``."""
        return self._memory[offset : offset + num_elements * dtype.itemsize].view(dtype)

    def allocate(self) -> None:
        """Allocate the memory; its contents are undefined.

        Raises:
            MemoryError: The device has too little memory, with sizes.
        """
        storage = self._memory.untyped_storage()
        # If a step ended early it is still there: torch would move it to another address.
        if storage.nbytes() != self.num_bytes:
            with allocating(self.num_bytes, self._memory.device, self._purpose):
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
