# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on a stack, and an engine of one rank that holds all of its matrices."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.runtime.agreement import Domain
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.plan_runner import PlanInput


def settings(
    steps: int = 5,
    coefficient_type: str = "quintic",
    *,
    is_bf16: bool = True,
    scale: tuple[float, float] = (1.0, 1.0),
) -> NewtonSchulzSettings:
    """Return settings with one scale for all shapes."""
    return NewtonSchulzSettings(steps, coefficient_type, is_bf16, lambda rows, cols: scale)


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


def local_engine(
    plans: Sequence[ExchangePlan],
    of: NewtonSchulzSettings,
    device: torch.device,
    rows_device: torch.device | None = None,
) -> Engine:
    """Build the engine of the only rank of some plans; handles count their matrices from 0."""
    handles = itertools.count()
    alone = Domain((0,), None, None)
    inputs = [
        PlanInput(
            alone, plan.matrices, {i: next(handles) for i, _ in enumerate(plan.matrices)}, None
        )
        for plan in plans
    ]
    schedule = RankSchedule.build(plans, rank=0)
    return Engine(plans, inputs, schedule, {}, of, device=device, rows_device=rows_device)
