# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods on stacks of whole matrices, against emerging-optimizers matrix by matrix."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from helpers.device import device
from helpers.fsdp2_models import drawn

from megatron_muon.newton_schulz.settings import NorMuon


@pytest.mark.parametrize(
    "shape", [(24, 48), (48, 24), (32, 32), (1, 9), (9, 1), (2, 5000), (300, 200)]
)
def test_normuon_of_a_stack_has_the_bits_of_upstream(shape):
    """NorMuon of a stack has upstream's bits of each matrix over three steps.

    On a GPU a stack may be summed in another order than a matrix: means of up to 5000
    squares in float32, which a root halves, so that 1e-5 is enough.
    """
    reference = AdaptiveMuon(
        [torch.nn.Parameter(drawn(shape, 0))], 0.1, 0.9, 0.0, moment2_method="normuon"
    )
    method = NorMuon()
    ours = torch.zeros(3, *method.state_shape(*shape), device=device())
    theirs = torch.zeros_like(ours)
    for step in range(3):
        with fp32_matmul_precision("medium"):
            raw = [
                muon_utils.newton_schulz(drawn(shape, 10 * step + i), 5, "quintic")
                for i in range(3)
            ]
        expected = [
            reference._apply_moment2_normalization(matrix, moment, 0.95, 1e-8)
            for matrix, moment in zip(raw, theirs, strict=True)
        ]
        # As the engine has them: a stack in memory of its own.
        found = method(torch.stack(raw).contiguous(), ours)
        tolerance = 0.0 if device().type == "cpu" else 1e-5
        torch.testing.assert_close(found, torch.stack(expected), rtol=tolerance, atol=0.0)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0.0)
