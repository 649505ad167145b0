# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The script that needs megatron-core alone."""

import ast
import re
import runpy
import sys
from typing import Any

import pytest
from helpers.ranks import ROOT, run_ranks

SCRIPT = ROOT / "scripts" / "train_megatron_core.py"


def _run_script(*arguments: str) -> None:
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.ranks
def test_script_on_megatron_core_alone_learns():
    """From the logarithm of the vocabulary's size to almost nothing, on every rank's data."""
    output = run_ranks(2, _run_script, "--steps", "40").check().outputs[0]
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)", output, re.M)]
    assert len(losses) == 5
    assert losses[0] > 3.5
    assert losses[-1] < 0.1


def _run_script_with_a_norm_on_the_device(*arguments: str) -> None:
    """Return the norm from each step as Transformer Engine's kernels leave it."""
    import torch

    from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer

    original = FSDPMuonChainedOptimizer.step

    def step(self: Any) -> tuple[bool, torch.Tensor, Any]:
        is_done, norm, num_zeros = original(self)
        return is_done, torch.tensor([norm]), num_zeros

    FSDPMuonChainedOptimizer.step = step
    _run_script(*arguments)


@pytest.mark.ranks
def test_script_prints_the_norm_that_transformer_engine_leaves_on_the_device():
    """A tensor of shape (1,), which no format string takes: the script died at its first print."""
    run = run_ranks(1, _run_script_with_a_norm_on_the_device, "--steps", "1").check()
    assert re.search(r"^step +1  loss [\d.]+  grad norm [\d.]+$", run.outputs[0], re.M)


def test_script_imports_nothing_of_megatron_training():
    """It is for people who have a training loop of their own."""
    modules = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert any(module.startswith("megatron.core") for module in modules)
    assert not any(module.startswith("megatron.training") for module in modules)
