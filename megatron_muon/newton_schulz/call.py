# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a stack of matrices is orthogonalized as."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_muon.newton_schulz.coefficients import Coefficients, coefficients_of
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Call:
    """What a stack of matrices is orthogonalized as.

    Args:
        settings: Steps, coefficients and precision.
        whole_shape: Shape of the whole matrices; larger than the stack's only for parts.
        is_normalized: Whether the norm of each whole matrix is 1. The stack is then bfloat16,
            otherwise float32.
        parts_group: Ranks that hold the parts of each matrix; then the stack holds one. None where
            matrices are whole.
    """

    settings: NewtonSchulzSettings
    whole_shape: tuple[int, int]
    is_normalized: bool
    parts_group: "dist.ProcessGroup | None" = None

    @property
    def is_tall(self) -> bool:
        """Whether the whole matrix is: a part of a tall matrix may itself be wide."""
        return self.whole_shape[0] > self.whole_shape[1]

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """Of each step."""
        return coefficients_of(self.settings.steps, self.settings.coefficient_type)
