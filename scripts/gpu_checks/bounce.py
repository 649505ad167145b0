# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives that gloo lacks for CUDA tensors, through the CPU.

NCCL refuses two ranks on one GPU, so ranks that share one talk over gloo. What it lacks is tried
once and replaced, in the process of this rank alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class _Done:
    """A collective that has ended, for callers that wait for it, perhaps on another stream.

    Args:
        output: What the current stream has written.
    """

    def __init__(self, output: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(output.device) if output.is_cuda else None
        self._written = stream.record_event() if stream is not None else None

    def wait(self, _timeout: object = None) -> bool:
        """Let the current stream wait, and return True."""
        if self._written is not None:
            self._written.wait()
        return True


def replace_missing(device: torch.device) -> list[str]:
    """Try the collectives that a step needs on the device, and replace those that fail.

    Returns:
        Names of those that were replaced, the same on all ranks.

    Communication: each collective once over all ranks, of a few elements.
    """
    replaced = []
    for name, (trial, through_cpu) in _COLLECTIVES.items():
        try:
            trial(device)
        except (RuntimeError, ValueError, NotImplementedError):
            # What a backend lacks, it lacks on all ranks.
            setattr(dist, name, through_cpu(getattr(dist, name)))
            replaced.append(name)
    return replaced


def _try_all_reduce(device: torch.device) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int32):
        _reduce_ones(dtype, device)


def _reduce_ones(dtype: torch.dtype, device: torch.device) -> None:
    tensor = torch.ones(3, dtype=dtype, device=device)
    dist.all_reduce(tensor)
    if not bool((tensor == dist.get_world_size()).all()):
        raise RuntimeError(f"all_reduce of {dtype} is wrong")


def _try_all_gather(device: torch.device) -> None:
    gathered = torch.zeros(2 * dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, gathered.new_full((2,), dist.get_rank()))
    if gathered.tolist() != [rank for rank in range(dist.get_world_size()) for _ in range(2)]:
        raise RuntimeError("all_gather_into_tensor is wrong")


def _try_all_to_all(device: torch.device) -> None:
    # Messages of as many elements as the receiver's rank: one of them is empty.
    world, rank = dist.get_world_size(), dist.get_rank()
    sent = torch.full((sum(range(world)),), rank, dtype=torch.bfloat16, device=device)
    received = sent.new_zeros(rank * world)
    work = dist.all_to_all_single(received, sent, [rank] * world, list(range(world)), async_op=True)
    work.wait()
    if received.tolist() != [sender for sender in range(world) for _ in range(rank)]:
        raise RuntimeError("all_to_all_single is wrong")


def _all_reduce_through_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> _Done:
        """Reduce a copy on the CPU."""
        copy = tensor.cpu()
        original(copy, op=op, group=group)
        tensor.copy_(copy)
        return _Done(tensor)

    return all_reduce


def _all_gather_through_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(
        output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> _Done:
        """Gather copies on the CPU."""
        copy = torch.empty_like(output, device="cpu")
        original(copy, tensor.cpu(), group=group)
        output.copy_(copy)
        return _Done(output)

    return all_gather_into_tensor


def _all_to_all_through_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        group: Any = None,
        async_op: bool = False,
    ) -> _Done:
        """Exchange copies on the CPU."""
        copy = torch.empty_like(output, device="cpu")
        original(copy, tensor.cpu(), list(output_sizes), list(input_sizes), group=group)
        output.copy_(copy)
        return _Done(output)

    return all_to_all_single


_COLLECTIVES = {
    "all_reduce": (_try_all_reduce, _all_reduce_through_cpu),
    "all_gather_into_tensor": (_try_all_gather, _all_gather_through_cpu),
    "all_to_all_single": (_try_all_to_all, _all_to_all_through_cpu),
}
