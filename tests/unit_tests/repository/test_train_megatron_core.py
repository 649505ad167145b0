# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The script that needs megatron-core alone."""

import re
import runpy
import sys
from typing import Any

import pytest
from helpers.ranks import ROOT, run_ranks

SCRIPT = ROOT / "scripts" / "train_megatron_core.py"


def _run_script(*arguments: str) -> None:
    import torch

    from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer

    original = FSDPMuonChainedOptimizer.step

    def step(self: Any) -> tuple[bool, torch.Tensor, Any]:
        """Return the norm as Transformer Engine's kernels leave it, of shape ``(1,)``."""
        is_done, norm, num_zeros = original(self)
        return is_done, torch.tensor([norm]), num_zeros

    FSDPMuonChainedOptimizer.step = step
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.ranks
def test_script_on_megatron_core_alone_learns():
    """The script learns, and prints norms that are tensors of one element."""
    output = run_ranks(2, _run_script, "--steps", "40").check().outputs[0]
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)  grad", output, re.M)]
    assert len(losses) == 5
    assert losses[0] > 3.5
    assert losses[-1] < 0.1
