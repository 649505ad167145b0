# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Figures and ranges of a step."""

import itertools
from typing import Any

import pytest
import torch
from helpers import fsdp2_models
from helpers.device import device, init_group
from helpers.ranks import run_ranks

from megatron_muon.fsdp2 import Muon, MuonAdamW


def _step(case: str, is_exact: bool) -> list[Any]:
    """Return the figures of two steps, and what they should be by whole tensors."""
    parameters = getattr(fsdp2_models, case)()
    muon = Muon(
        [{"params": [each.param], **each.keys} for each in parameters],
        lr=0.5,
        weight_decay=0.0,
        nesterov=True,
        newton_schulz=fsdp2_models.orthogonal if is_exact else None,
    )
    muon.record_metrics()
    found = []
    for step in range(2):
        before = [each.param.full_tensor().detach().clone() for each in parameters]
        for i, each in enumerate(parameters):
            each.draw_grad(9 * step + i)
        grads = [each.param.grad.full_tensor() for each in parameters]
        muon.step()
        momentum = [muon.state[each.param]["momentum_buffer"].full_tensor() for each in parameters]
        updates = [
            (old - each.param.full_tensor()) / 0.5
            for old, each in zip(before, parameters, strict=True)
        ]
        of_whole = [
            [float(each.norm()) for each in grads],
            [float(each.norm()) for each in momentum],
            [float(each.square().mean().sqrt()) for each in updates],
        ]
        found.append([list(muon.last_metrics()), of_whole])
    return found


def _steps() -> list[list[Any]]:
    init_group()
    cases = [("hybrid", False), ("hybrid_tensor_parallel", False), ("hybrid", True)]
    return [_step(*case) for case in cases]


@pytest.mark.ranks
def test_figures_are_those_of_whole_tensors():
    """Rows that several ranks hold count once; ranks see the same figures."""
    (first, *others) = run_ranks(4, _steps).check().results
    assert all(other == first for other in others)
    *newton_schulz, exact = first
    for (gradients, momenta, updates, error), expected in itertools.chain(*newton_schulz):
        # Sums in float32, in another order; updates are differences of weights of about 1.
        for figures, of_whole in zip((gradients, momenta, updates), expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(figures), torch.tensor(of_whole), rtol=1e-4, atol=1e-4
            )
        # Newton-Schulz leaves singular values between 0.7 and 1.2.
        assert 0.01 < error < 0.6
    # By singular values in place of Newton-Schulz.
    for figures, _ in exact:
        assert figures[3] < 1e-4


def test_figures_that_were_not_asked_for_are_refused():
    """Nothing is recorded then."""
    muon = Muon([torch.nn.Parameter(torch.ones(2, 3, device=device()))])
    with pytest.raises(RuntimeError, match=r"expected record_metrics\(\) before the step"):
        muon.last_metrics()


def test_phases_of_a_step_are_ranges_of_a_profile():
    """By name; AdamW's among them."""
    matrix, vector = (torch.nn.Parameter(torch.ones(n, device=device())) for n in ((2, 3), (2,)))
    optimizer = MuonAdamW(
        [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}], lr=0.1
    )
    for each in (matrix, vector):
        each.grad = torch.ones_like(each)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = {event.key for event in profile.key_averages()}
    phases = {"momentum", "norms", "local_matrices", "update", "elementwise"}
    assert {f"Muon.{phase}" for phase in phases} <= names
