# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on a stack, with settings by name."""

from typing import Any

import torch

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings


def settings(
    steps: int = 5, coefficient_type: str = "quintic", *, is_bf16: bool = True
) -> NewtonSchulzSettings:
    """Return settings without a scale."""
    return NewtonSchulzSettings(steps, coefficient_type, is_bf16, lambda rows, cols: (1.0, 1.0))


def orthogonalized(
    stack: torch.Tensor,
    backend: str = "standard",
    *,
    of: NewtonSchulzSettings | None = None,
    whole_shape: tuple[int, int] | None = None,
    is_normalized: bool = True,
    parts_group: Any = None,
) -> torch.Tensor:
    """Orthogonalize a stack, of whole matrices where no other shape is given."""
    whole = whole_shape or (stack.shape[1], stack.shape[2])
    args = NewtonSchulzArgs(of or settings(), whole, is_normalized, parts_group)
    return BACKENDS[backend].run(stack, args)
