# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings, shape and parts of a stack of matrices that is orthogonalized."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Call:
    """How to orthogonalize a stack of matrices.

    Args:
        settings: Steps, coefficients and precision.
        whole_shape: Shape of the whole matrices; larger than the stack's only for parts.
        is_normalized: Whether the norm of a whole matrix is 1. The stack is then bfloat16,
            otherwise float32.
        parts_group: Ranks that hold the parts of the single matrix of the stack; None if matrices
            are whole.
    """

    settings: NewtonSchulzSettings
    whole_shape: tuple[int, int]
    is_normalized: bool
    parts_group: "dist.ProcessGroup | None" = None

    @property
    def is_tall(self) -> bool:
        """Whether the whole matrix is tall; a part of it may be wide."""
        return self.whole_shape[0] > self.whole_shape[1]
