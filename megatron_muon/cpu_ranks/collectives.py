# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What NCCL does and gloo does not: averages, uneven lists, groups asked for by NCCL's name.

Every function takes the original and returns its replacement.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

type ProcessGroups = dist.ProcessGroup | list[dist.ProcessGroup]
type ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
# None if the collective is blocking.
type Work = "dist.Work | CompletedWork | None"


class CompletedWork:
    """A finished collective, for callers that passed ``async_op=True``."""

    def wait(self, _timeout: object = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def as_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return c10d's ``_new_process_group_helper`` that creates gloo groups in place of NCCL's.

    ``init_process_group``, ``new_group`` and their relatives all end in it. NCCL's options and the
    device to bind to are dropped with the backend.
    """

    @functools.wraps(original)
    def _new_process_group_helper(
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: str,
        *args: object,
        **kwargs: object,
    ) -> tuple[dist.ProcessGroup | None, dist.Store | None]:
        # "undefined" is init_process_group without a backend: torch would choose NCCL, as a GPU is
        # "available". Megatron's callers ask for both backends by "cpu:gloo,cuda:nccl".
        if "nccl" in str(backend) or str(backend) == "undefined":
            backend = dist.Backend(dist.Backend.GLOO)
            kwargs["backend_options"] = None
        kwargs["device_id"] = None
        return original(group_size, group_rank, ranks, backend, *args, **kwargs)

    return _new_process_group_helper


def averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction that averages by dividing its input, then summing.

    Communication: as the original.
    Memory: for an average a copy of the input, unless the reduction is in place.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def reduction(*args: object, **kwargs: object) -> Work:
        """Replace an average by a sum of shares."""
        bound = signature.bind(*args, **kwargs)
        given: dict[str, Any] = bound.arguments
        if given.get("op") == dist.ReduceOp.AVG:
            given["op"] = dist.ReduceOp.SUM
            size = dist.get_world_size(given.get("group"))
            if "input_list" in given:
                given["input_list"] = [tensor / size for tensor in given["input_list"]]
            elif "input" in given:
                given["input"] = given["input"] / size
            else:
                given["tensor"].div_(size)
        return original(*bound.args, **bound.kwargs)

    return reduction


def _is_uneven(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) > 1


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    """Return ``tensor`` flat and zero-padded to ``numel`` elements."""
    return torch.nn.functional.pad(tensor.detach().reshape(-1), (0, numel - tensor.numel()))


def uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``all_gather`` that accepts outputs of different sizes.

    Gloo gathers equal blocks only, so all are padded to the largest. Every rank knows all the
    sizes, so that all decide in the same way.

    Communication: one ``all_gather`` of the largest size per rank, blocking even with ``async_op``
        if sizes differ.
    Memory: world size blocks of the largest size.
    """

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work:
        """Gather padded tensors if their sizes differ."""
        if not _is_uneven(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        numel = max(output.numel() for output in tensor_list)
        gathered = [tensor.new_empty(numel) for _ in tensor_list]
        original(gathered, _padded(tensor, numel), group=group)
        for output, flat in zip(tensor_list, gathered, strict=True):
            output.copy_(flat[: output.numel()].view(output.shape))
        return CompletedWork() if async_op else None

    return all_gather


def uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``reduce_scatter`` that accepts inputs of different sizes, and averages.

    Communication: one ``reduce_scatter`` of the largest size per rank, blocking even with
        ``async_op`` if sizes differ.
    Memory: world size blocks of the largest size.
    """
    averaged = averaging(original)

    @functools.wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: ReduceOp = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work:
        """Scatter padded tensors if their sizes differ."""
        if not _is_uneven(input_list):
            return averaged(output, input_list, op=op, group=group, async_op=async_op)
        numel = max(tensor.numel() for tensor in input_list)
        flat = output.new_empty(numel)
        averaged(flat, [_padded(tensor, numel) for tensor in input_list], op=op, group=group)
        output.copy_(flat[: output.numel()].view(output.shape))
        return CompletedWork() if async_op else None

    return reduce_scatter


def waiting_coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_coalescing_manager`` whose collectives are complete when the context ends.

    Communication: as the original, blocking even with ``async_ops``.
    """

    @contextmanager
    def _coalescing_manager(
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Iterator[Any]:
        with original(group, device, async_ops=False) as pending:
            yield pending

    return functools.wraps(original)(_coalescing_manager)


def mesh_from_group_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DeviceMesh.from_group`` that makes CPU meshes in place of CUDA's."""

    @functools.wraps(original)
    def from_group(
        group: ProcessGroups, device_type: str, *args: object, **kwargs: object
    ) -> DeviceMesh:
        """Make a mesh of CPU ranks for one of GPUs."""
        return original(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return from_group
