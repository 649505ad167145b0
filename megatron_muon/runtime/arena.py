# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that exists while a step runs."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.runtime.tensors import local_tensor


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

    Raises:
        MemoryError: The device has too little memory, with sizes.

    Memory: ``num_bytes``, allocated once at construction to show that it is there, and then while
        a step runs.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        try:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # A GPU raises torch.OutOfMemoryError, which is one of these; a CPU nothing more special.
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise MemoryError(
                f"expected {num_bytes:,} bytes on {device} for messages and stacks, got "
                f"{type(error).__name__}: {reason}{free_memory(device)}"
            ) from error

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


def free_memory(device: torch.device) -> str:
    """Return what is free on a GPU, as the end of a sentence."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f"; {free:,} of {total:,} bytes are free on {device}"


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
    found = [_elementwise_bytes(each, device) for each in optimizers]
    return OtherBytes(
        sum(each.state for each in found), max((each.temporaries for each in found), default=0)
    )


def _elementwise_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> OtherBytes:
    """Return the memory of the next step of one optimizer.

    Source: torch 2.15, torch/optim/adam.py, _single_tensor_adam and _multi_tensor_adam.
    """
    is_adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    new_state, temporaries = 0, 0
    for group in optimizer.param_groups:
        held = [
            (param, local.numel() * local.itemsize)
            for param in group["params"]
            if param.grad is not None and (local := local_tensor(param)).device == device
        ]
        num_states = 2 + group["amsgrad"] if is_adam else 1
        new_state += num_states * sum(size for p, size in held if not optimizer.state.get(p))
        if not held or group.get("fused"):
            continue
        sizes = [size for _, size in held]
        # torch's default for DTensors is one by one.
        foreach = group.get("foreach", True)
        one_by_one = foreach is False or (foreach is None and isinstance(held[0][0], DTensor))
        is_copied = is_adam and (
            group["maximize"] or (group["weight_decay"] and not group.get("decoupled_weight_decay"))
        )
        # One by one, those of the parameter before are still there.
        unit, num = (max(sizes), 3) if one_by_one else (sum(sizes), 1)
        temporaries = max(temporaries, unit * (num + 2 * bool(is_copied)))
    return OtherBytes(new_state, temporaries)
