# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Elementwise additions to a step, beside the same arithmetic on whole matrices in plain torch."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor, muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from helpers.fsdp2_models import FSDP2, drawn
from helpers.ranks import on_ranks

from megatron_muon.fsdp2 import ExchangeSettings, Muon

LR, DECAY = 0.5, 0.3


def _decayed(update: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return an update with the decay of the elements that it shrinks, and of zero updates."""
    return update.add(torch.where(update * weight >= 0, weight, 0.0), alpha=DECAY)


@on_ranks(2)
def test_cautious_decay_has_the_bits_of_whole_matrices_and_is_in_no_metric():
    """Only elements that the update shrinks are decayed, and ``update_rms`` is without decay."""
    sharded = FSDP2[2]["uneven"]()
    wholes = [each.whole.clone() for each in sharded]
    momenta = [torch.zeros_like(whole) for whole in wholes]
    muon = Muon(
        [each.param for each in sharded],
        lr=LR,
        weight_decay=DECAY,
        weight_decay_method="cautious",
        nesterov=True,
        fp32_matmul_prec="highest",
        exchange=ExchangeSettings(comm_dtype="fp32", max_owners=1),
    )
    muon.record_metrics()
    for step in range(3):
        updates = []
        for number, (each, whole, momentum) in enumerate(
            zip(sharded, wholes, momenta, strict=True)
        ):
            grad = drawn(whole.shape, 9 * step + number).to(whole)
            # Rows of zeros have updates of zeros.
            grad[:1] = 0.0
            each.set_grad(grad)
            momentum.lerp_(grad, 0.05)
            with fp32_matmul_precision("highest"):
                result = muon_utils.newton_schulz(grad.lerp(momentum, 0.95), 5, "quintic")
            updates.append(result * get_muon_scale_factor(*whole.shape, mode="spectral"))
            whole.sub_(_decayed(updates[-1], whole), alpha=LR)
        muon.step()
        for each, whole in zip(sharded, wholes, strict=True):
            assert torch.equal(each.param._local_tensor, each.own(whole))
        (rms,) = muon.last_metrics().update_rms
        expected = torch.cat([update.flatten() for update in updates]).square().mean().sqrt()
        # Sums in float32, in another order.
        assert abs(rms / float(expected) - 1) < 1e-5


@pytest.mark.parametrize(
    ("options", "num_copies"),
    [({}, 0), ({"weight_decay_method": "cautious"}, 1), ({"adaptive": "adamuon"}, 1)],
    ids=str,
)
def test_ranks_agree_on_the_memory_of_hooks(options, num_copies, monkeypatch):
    """Ranks agree on copies of results, which may need more than the workspace of Newton-Schulz."""
    asked = []
    step = Muon([torch.nn.Parameter(torch.ones(6, 9)) for _ in range(2)], **options).muon
    monkeypatch.setattr(step.engine, "reserve", lambda others: asked.append(others.temporaries))
    assert step.reserve() == []
    assert asked == [num_copies * 4 * 2 * 6 * 9]
