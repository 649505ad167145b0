# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Local tensors: of a DTensor, adjacent in memory, not finite."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def as_shard(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return a local tensor as the shard of a contiguous tensor, without a collective to check."""
    whole = torch.empty(*shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, itself rather than a view; a plain tensor as it is.

    ``DTensor.to_local`` makes a view, and passes through autograd and the dispatcher to do so.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # A dictionary lookup in place of calls: it runs for every parameter of every step.
    return inner_tensor(local) if type(local) not in _WITH_STORAGE else local


# Of emerging-optimizers' and torch's own parameters; other classes may wrap a tensor.
_WITH_STORAGE = {torch.Tensor, torch.nn.Parameter}


def inner_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the only tensor that a tensor without storage wraps, or the tensor itself.

    FSDP2 gathers such parameters in another form: torchao's float8 weights wrap a tensor of high
    precision. Updates of that tensor are updates of the parameter.
    """
    # Tensors of collectives may be in flight.
    if not is_traceable_wrapper_subclass(tensor) or isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    names, _ = tensor.__tensor_flatten__()
    inner = [local_tensor(getattr(tensor, name)) for name in names]
    is_like = len(inner) == 1 and (inner[0].shape, inner[0].dtype) == (tensor.shape, tensor.dtype)
    return inner[0] if is_like else tensor


def sharding_of(value: Any, *attributes: str) -> str:  # noqa: ANN401 - of users
    """Describe the shard of a rank, with attributes of its tensor; of no tensor the type."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    local = local_tensor(value)
    # Sizes of an empty shard vary.
    parts = [f"local shape {tuple(local.shape) if local.numel() else 'empty'}"]
    parts += [str(value.placements)] if isinstance(value, DTensor) else []
    return ", ".join(parts + [str(getattr(local, name)) for name in attributes])


def are_same(references: Sequence[weakref.ref[torch.Tensor]], tensors: Sequence[Any]) -> bool:
    """Return whether references are to these tensors, all of which exist."""
    return len(references) == len(tensors) and all(
        tensor is not None and reference() is tensor
        for reference, tensor in zip(references, tensors, strict=True)
    )


def join_adjacent(*lists: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Join consecutive tensors that are adjacent in memory, in every one of several lists.

    Megatron-FSDP keeps the weights of a unit in one buffer, and its gradients in another: an
    elementwise operation then needs one call a buffer, rather than one a parameter.

    Args:
        *lists: Lists of contiguous tensors, of one dtype a list. Tensors at one position have
            equally many elements, and none is empty.

    Returns:
        As many lists, in the same order: one-dimensional views of adjacent tensors, and the other
        tensors as they are.
    """
    joined: list[list[torch.Tensor]] = [[] for _ in lists]
    count = len(lists[0])
    firsts = [
        n
        for n in range(count)
        if n == 0 or not all(_touch(tensors[n - 1], tensors[n]) for tensors in lists)
    ]
    for first, end in itertools.pairwise([*firsts, count]):
        num_elements = sum(tensor.numel() for tensor in lists[0][first:end])
        for views, tensors in zip(joined, lists, strict=True):
            is_alone = end == first + 1
            views.append(
                tensors[first] if is_alone else tensors[first].as_strided((num_elements,), (1,))
            )
    return joined


def _touch(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether a tensor begins where another one ends, in the same allocation."""
    return before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr() and bool(
        before.storage_offset() + before.numel() == after.storage_offset()
    )


class NotFinite(NamedTuple):
    """Gradients that are not finite.

    Args:
        number: How many there are, an integer scalar on the device.
        explain: Returns a sentence for every such gradient; the host reads then.
    """

    number: torch.Tensor
    explain: Callable[[], list[str]]


def find_not_finite(grads: Sequence[tuple[str, torch.Tensor]], device: torch.device) -> NotFinite:
    """Look for NaN and Inf in gradients.

    Args:
        grads: Names of parameters, and their local gradients, none of them empty.
        device: Where they live.
    """
    # A norm is not finite where an element is not; it is a fused pass, and a fast one.
    norms = (
        torch._foreach_norm([grad for _, grad in grads])
        if grads
        else [torch.zeros((), dtype=torch.float32, device=device)]
    )
    # An embedding may be in CPU memory beside a model on a GPU.
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(device) for norm in norms]
    not_finite = ~torch.stack([norm.float() for norm in norms]).isfinite()

    # Not the tensors: it may be called when a later step has freed them.
    names = [fqn for fqn, _ in grads]

    def explain() -> list[str]:
        """Name the gradients that are not finite; the host reads here."""
        return [
            f"{fqn}: expected a finite gradient, got NaN or Inf, or a norm beyond float32"
            for fqn, is_bad in zip(names, not_finite.tolist(), strict=False)
            if is_bad
        ]

    return NotFinite(not_finite.sum(dtype=torch.int32), explain)
