# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Local rows of a DTensor."""

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank, without a view of their own; a plain tensor itself.

    ``DTensor.to_local`` makes a view, and passes through autograd and the dispatcher to do so.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
