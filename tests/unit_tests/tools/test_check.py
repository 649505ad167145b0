# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The command that checks a machine: on sound CPU ranks, and with something broken."""

import json
import os
from unittest import mock

import pytest
import torch
from helpers.device import init_group
from helpers.ranks import ROOT, launch, run_ranks

from megatron_muon.fsdp2.muon import Muon
from megatron_muon.plan.cost import CostModel
from megatron_muon.tools.check import results
from megatron_muon.tools.check.rates import fitted_curve
from megatron_muon.tools.check.verdicts import Finding, on_all_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.slow
def test_sound_cpu_ranks_pass_and_their_rates_are_a_cost_model(tmp_path):
    """Every class of optimizers passes on sound CPU ranks, Megatron's too."""
    path = tmp_path / "check.json"
    script = ROOT / "megatron_muon" / "check.py"
    run = launch(2, ["--json", str(path)], script=script).check()
    content = json.loads(path.read_text())
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    for name in ("fsdp2.Muon", "fsdp2.MuonAdamW", "Megatron-FSDP"):
        assert verdicts[f"step of {name}"] == "PASS"
    assert set(verdicts.values()) == {"PASS", "SKIP"}
    rates = CostModel.parse(content["cost_model"])
    assert rates.gbps == pytest.approx(float(content["cost_model"].rpartition("=")[2]))
    assert f"rates: {content['cost_model']}" in run.outputs[0]


def _step_of_wrong_results() -> list[str]:
    from megatron_muon.newton_schulz.standard import Standard

    init_group()
    run = Standard.run
    with mock.patch.object(Standard, "run", lambda *args: 1.1 * run(*args)):
        return list(results.check_fsdp2_step(Muon, torch.device("cpu")))


def test_wrong_results_of_a_step_fail():
    """A step whose Newton-Schulz results are a tenth too large fails the check."""
    ((verdict, result, _),) = run_ranks(1, _step_of_wrong_results).check().results
    assert verdict == "FAIL"
    assert result.startswith("differs by 1.0e-01")


def _find_on_rank_1() -> list[list[str]]:
    import torch.distributed as dist

    from megatron_muon.tools.check import environment

    init_group()
    is_broken = dist.get_rank() == 1
    if is_broken:
        environment.version_problems = lambda versions: ["torch: expected 2.9, found 2.0"]

    def check() -> Finding:
        """Fail to compile on one rank."""
        if is_broken:
            raise OSError("libcuda.so cannot open shared object file\nand more")
        return Finding("PASS", "equal bits")

    checks = {"row kernel": check, "versions": environment.check_versions}
    return [list(on_all_ranks(name, call)) for name, call in checks.items()]


def test_finding_of_one_rank_is_that_of_all_ranks():
    """The first line of one rank's error, or its version, is what all ranks report.

    The rank joins the comparison of versions before it returns.
    """
    for error, version in run_ranks(2, _find_on_rank_1).check().results:
        text = "OSError: libcuda.so cannot open shared object file (ranks 1)"
        assert error[:2] == ["FAIL", text]
        assert version[:2] == ["FAIL", "torch: expected 2.9, found 2.0 (ranks 1)"]


def test_broken_row_kernel_is_slow_and_named(monkeypatch):
    """A kernel of rows with other bits is reported as slow, since torch moves the rows then."""
    difference = "torch.float32 to torch.bfloat16: other bits than torch's"
    monkeypatch.setattr(results, "difference_from_torch", lambda device: difference)
    verdict, result, _ = results.check_row_kernel(torch.device("cuda"))
    assert (verdict, result) == ("SLOW", difference)


def _check_beside_a_dead_rank() -> int:
    from megatron_muon.tools.check import command

    with mock.patch.object(results, "check_row_kernel", _die_on_rank_1):
        return command.main([])


def _die_on_rank_1(device: torch.device) -> Finding:
    if os.environ["RANK"] == "1":
        os._exit(9)
    return Finding("PASS", "equal bits")


def test_rank_that_ends_is_named_by_the_others():
    """The other ranks do not wait for a rank that ends, and name the check that it left."""
    run = run_ranks(2, _check_beside_a_dead_rank)
    assert run.exit_codes == [1, 9]
    assert "row kernel: expected findings of 2 ranks, got an error on rank 0" in run.outputs[0]
    assert "Traceback" not in run.outputs[0]


def test_curve_of_rates_is_found_again():
    """The fit returns the curve of exact rates, and no half-rate side for rates that fall."""
    sides = (512, 1024, 4096)
    rates = [900 * n / (n + 1350) for n in sides]
    assert fitted_curve(sides, rates) == pytest.approx((900, 1350))
    assert fitted_curve(sides, [3.0, 2.0, 1.0]) == (3.0, 0.0)
