# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie one after the other in memory, as few long ones."""

import operator
from collections.abc import Sequence

import torch


def join_adjacent(*lists: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Join consecutive tensors that are adjacent in memory, in every one of several lists.

    Megatron-FSDP keeps the weights and gradients of a unit in one buffer each: what is computed
    element by element needs one call a buffer, and the host does not handle every parameter.

    Args:
        *lists: Contiguous tensors of one dtype a list; those at one position have equally many
            elements, and none is empty.

    Returns:
        As many lists, in the same order: one-dimensional views of several tensors, and tensors that
        are adjacent to no other as they are.
    """
    joined: list[list[torch.Tensor]] = [[] for _ in lists]
    positions = range(len(lists[0]))
    first = 0
    for last in positions:
        if last + 1 in positions and all(_touch(each[last], each[last + 1]) for each in lists):
            continue
        num_elements = sum(lists[0][number].numel() for number in range(first, last + 1))
        for views, each in zip(joined, lists, strict=True):
            views.append(
                each[first] if first == last else each[first].as_strided((num_elements,), (1,))
            )
        first = last + 1
    return joined


class AdjacentViews:
    """The joined views of a list, made again only when its memory has moved.

    A view keeps its memory: call :meth:`forget` where a list is allocated anew in every step.
    """

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor] = ()
        self._views: list[torch.Tensor] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return :func:`join_adjacent` of a list, which may be empty."""
        if not is_same_memory(tensors, self._tensors):
            (self._views,) = join_adjacent(tensors)
        self._tensors = tensors
        return self._views

    def forget(self) -> None:
        """Drop the views."""
        self._tensors, self._views = (), []


def is_same_memory(now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    """Return whether a list is in the same memory; most are the same tensors."""
    if now is before or len(now) != len(before) or all(map(operator.is_, now, before)):
        return len(now) == len(before)
    return [each.data_ptr() for each in now] == [each.data_ptr() for each in before]


def _touch(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether a tensor begins where another one ends, in the same allocation."""
    return before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr() and bool(
        before.storage_offset() + before.numel() == after.storage_offset()
    )
