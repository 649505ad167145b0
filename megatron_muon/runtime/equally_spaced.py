# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Several tensors as one, if their memory allows it."""

from collections.abc import Sequence

import torch


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View tensors of one shape at equal distances in one storage as one tensor.

    An example are the gradients of a layer's experts in the buffer of Megatron-FSDP: one call then
    replaces one call per expert.

    Args:
        tensors: All ``(rows, cols)``, of one dtype.

    Returns:
        ``(num_tensors, rows, cols)``, sharing their memory; None for any other arrangement.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    storage, shape, strides = first.untyped_storage().data_ptr(), first.shape, first.stride()
    distance = tensors[1].storage_offset() - first.storage_offset()
    offset = first.storage_offset()
    for number, tensor in enumerate(tensors):
        if (
            tensor.untyped_storage().data_ptr() != storage
            or tensor.shape != shape
            or tensor.stride() != strides
            or tensor.storage_offset() != offset + number * distance
        ):
            return None
    # Descending or overlapping tensors would need a negative stride, or be written to twice.
    if distance < first.numel():
        return None
    return first.as_strided((len(tensors), *shape), (distance, *strides))
