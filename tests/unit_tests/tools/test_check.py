# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The command that checks a machine: on sound CPU ranks, and with something broken."""

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ROOT, launch, on_ranks, run_ranks

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.tools.check import results
from megatron_muon.tools.check.verdicts import Finding, on_all_ranks

pytestmark = pytest.mark.ranks
FP32 = ExchangeSettings(comm_dtype="fp32", max_owners=1)


@pytest.mark.slow
def test_sound_cpu_ranks_pass_and_their_rates_are_a_cost_model():
    """Every check passes on sound CPU ranks, and the rates are a cost model."""
    script = ROOT / "megatron_muon" / "check.py"
    text = launch(2, [], script=script).check().outputs[0]
    verdicts = re.findall(r"^([\w ,-]+) \.\.\. (PASS|SKIP|FAIL): ", text, re.MULTILINE)
    assert {verdict for _, verdict in verdicts} == {"PASS"} and len(verdicts) == 6
    assert "step of Muon, fp32 messages ... PASS: equal bits" in text
    (rates,) = re.findall(r"^rates: (.*)$", text, re.MULTILINE)
    assert CostModel.parse(rates).gbps == float(rates.rpartition("=")[2])


def _without_momentum(self: Any, closure: Any = None) -> None:
    for group in self.param_groups:
        for param in group["params"]:
            param.data.add_(param.grad, alpha=-group["lr"])


@on_ranks(1)
def test_wrong_results_of_a_step_fail():
    """A step fails whose Newton-Schulz is a tenth too large, or a Muon of upstream that differs."""
    from emerging_optimizers.orthogonalized_optimizers import Muon

    from megatron_muon.newton_schulz.standard import Standard

    run, device = Standard.run, torch.device("cpu")
    with mock.patch.object(Standard, "run", lambda *args: 1.1 * run(*args)):
        finding = results.check_step(device, FP32)
    assert finding.verdict == "FAIL" and finding.text.startswith("differs by 9.5e-02")
    with mock.patch.object(Muon, "step", _without_momentum):
        assert results.check_step(device, FP32).verdict == "FAIL"


@on_ranks(2)
def test_finding_of_one_rank_is_that_of_all_ranks():
    """All ranks report the first line of one rank's error, or its version.

    The rank joins the comparison of versions before it returns.
    """
    is_broken = dist.get_rank() == 1
    if is_broken:
        results.version_problems = lambda versions: ["torch: expected 2.9, found 2.0"]

    def check() -> Finding:
        """Fail to compile on one rank."""
        if is_broken:
            raise OSError("libcuda.so cannot open shared object file\nand more")
        return Finding("PASS", "equal bits")

    text = "OSError: libcuda.so cannot open shared object file (ranks 1)"
    assert on_all_ranks("step", check) == Finding("FAIL", text)
    text = "torch: expected 2.9, found 2.0 -> See docs/support.md, Versions (ranks 1)"
    assert on_all_ranks("versions", results.check_versions) == Finding("FAIL", text)


def _check_beside_a_dead_rank() -> int:
    from megatron_muon.tools.check import command

    with mock.patch.object(results, "check_versions", _die_on_rank_1):
        return command.main([])


def _die_on_rank_1() -> Finding:
    if os.environ["RANK"] == "1":
        os._exit(9)
    return Finding("PASS", "equal bits")


def test_rank_that_ends_is_named_by_the_others():
    """The other ranks do not wait for a rank that ends, and name the check that it left."""
    run = run_ranks(2, _check_beside_a_dead_rank)
    assert run.exit_codes == [1, 9]
    assert "versions: expected findings of 2 ranks, got an error on rank 0" in run.outputs[0]
    assert "Traceback" not in run.outputs[0]
