# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The command that checks a machine: on sound CPU ranks, and with something broken."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.commands import run_command, run_torchrun
from helpers.device import init_group
from helpers.ranks import ROOT, run_ranks

from megatron_muon.check import results
from megatron_muon.check.rates import fitted_curve
from megatron_muon.check.verdicts import Finding, on_all_ranks
from megatron_muon.fsdp2.muon import Muon
from megatron_muon.plan.cost import CostModel

pytestmark = pytest.mark.ranks

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_sound_cpu_ranks_pass_and_their_rates_are_a_cost_model(tmp_path):
    """With every class of optimizers, Megatron's too."""
    script = str(ROOT / "megatron_muon" / "check" / "__main__.py")
    run = run_torchrun(2, script, "--json", str(tmp_path / "check.json"))
    assert run.returncode == 0, run.stderr
    content = json.loads((tmp_path / "check.json").read_text())
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    for name in ("fsdp2.Muon", "fsdp2.MuonAdamW", "Megatron-FSDP"):
        assert verdicts[f"step of {name}"] == "PASS"
    assert set(verdicts.values()) == {"PASS", "SKIP"}
    rates = CostModel.parse(content["cost_model"])
    assert rates.gbps == pytest.approx(float(content["cost_model"].rpartition("=")[2]))
    assert f"rates: {content['cost_model']}" in run.stdout


def _step_of_wrong_results() -> list[str]:
    from megatron_muon.newton_schulz.standard import Standard

    init_group()
    run = Standard.run
    with mock.patch.object(Standard, "run", lambda *args: 1.1 * run(*args)):
        return list(results.check_fsdp2_step(Muon, torch.device("cpu")))


def test_wrong_results_of_a_step_fail():
    """A tenth of the update is wrong behind Newton-Schulz."""
    ((verdict, result, _),) = run_ranks(1, _step_of_wrong_results).check().results
    assert verdict == "FAIL"
    assert result.startswith("differs by 1.0e-01")


def _run_with_a_broken_rank() -> list[str]:
    import torch.distributed as dist

    init_group()

    def check() -> Finding:
        """Fail to compile on one rank."""
        if dist.get_rank() == 1:
            raise OSError("libcuda.so cannot open shared object file\nand more")
        return Finding("PASS", "equal bits")

    return list(on_all_ranks("row kernel", check))


def test_error_of_one_rank_is_the_finding_of_all_ranks():
    """It names the rank, and quotes the first line."""
    for found in run_ranks(2, _run_with_a_broken_rank).check().results:
        assert found[0] == "FAIL"
        assert found[1] == "OSError: libcuda.so cannot open shared object file (ranks 1)"


def test_broken_row_kernel_is_slow_and_named(monkeypatch):
    """Rows then move by torch, so results are right."""
    difference = "torch.float32 to torch.bfloat16: other bits than torch's"
    monkeypatch.setattr(results, "difference_from_torch", lambda device: difference)
    verdict, result, _ = results.check_row_kernel(torch.device("cuda"))
    assert (verdict, result) == ("SLOW", difference)


def _run_with_another_version() -> list[str]:
    import torch.distributed as dist

    from megatron_muon.check import environment

    init_group()
    if dist.get_rank() == 1:
        environment.version_problems = lambda versions: ["torch: expected 2.9, found 2.0"]
    return list(on_all_ranks("versions", environment.check_versions))


def test_wrong_version_on_one_rank_is_the_finding_of_all_ranks():
    """The rank joins the comparison of versions before it returns."""
    for verdict, result, _ in run_ranks(2, _run_with_another_version).check().results:
        assert (verdict, result) == ("FAIL", "torch: expected 2.9, found 2.0 (ranks 1)")


_DEAD = """
import os, sys
import torch.distributed as dist
from megatron_muon.check import __main__ as command, results

def check(device):
    if dist.get_rank() == 1:
        os._exit(9)
    return results.Finding("PASS", "equal bits")

results.check_row_kernel = check
sys.exit(command.main([]))
"""


@pytest.mark.slow
def test_rank_that_ends_is_named_by_the_others(tmp_path):
    """They do not wait for it, and say which check it left."""
    script = Path(tmp_path / "dead.py")
    script.write_text(_DEAD)
    run = run_command(*_TORCHRUN, str(script))
    assert run.returncode == 1
    assert "row kernel: expected findings of 2 ranks, got an error on rank 0" in run.stderr
    assert "exitcode  : 9" in run.stderr


def test_curve_of_rates_is_found_again():
    """Least squares of exact rates; rates that fall have no half-rate side."""
    sides = (512, 1024, 4096)
    rates = [900 * n / (n + 1350) for n in sides]
    assert fitted_curve(sides, rates) == pytest.approx((900, 1350))
    assert fitted_curve(sides, [3.0, 2.0, 1.0]) == (3.0, 0.0)
