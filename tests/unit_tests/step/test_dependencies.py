# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Releases that lack what is relied on are refused with the name; others work."""

import re
import sys
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon, muon_utils
from helpers.commands import run_command
from helpers.device import init_group
from helpers.fsdp2_models import FSDP2
from helpers.later_releases import pretend_emerging_optimizers_0_5
from helpers.ranks import run_ranks
from torch.distributed.tensor import placement_types

from megatron_muon import enable, is_enabled
from megatron_muon.mcore.versions import IncompatibleMegatronError
from megatron_muon.newton_schulz.settings import coefficients_of
from megatron_muon.step.dependencies import dependency_problems


def test_this_environment_has_everything():
    """Symbols exist, and calls have the results that a step relies on; under any default."""
    assert dependency_problems() == []
    with torch.device("meta"):
        assert dependency_problems() == []


def _without_momentum(self: Any, closure: Any = None) -> None:
    for group in self.param_groups:
        for param in group["params"]:
            param.data.add_(param.grad, alpha=-group["lr"])


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (
            placement_types,
            "_StridedShard",
            None,
            "placement_types._StridedShard: expected it for FSDP2 beside tensor parallelism, got "
            "none in torch ",
        ),
        (
            muon_utils,
            "newton_schulz_step",
            None,
            "muon_utils.newton_schulz_step: expected it for Newton-Schulz of bf16 matrices, got "
            "none in emerging-optimizers ",
        ),
        (
            Muon,
            "step",
            _without_momentum,
            "Muon.step: expected it as in the tested releases, got another result in "
            "emerging-optimizers ",
        ),
    ],
)
def test_what_is_missing_or_other_is_named(owner, name, value, said, monkeypatch):
    """Also by enable(), which then changes nothing."""
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, value)
    # A step of Muon may need it too.
    problem = dependency_problems()[0]
    assert said in problem and "Install a release of docs/support.md" in problem
    with pytest.raises(IncompatibleMegatronError, match="nothing was changed") as caught:
        enable()
    assert problem in str(caught.value) and not is_enabled()


@pytest.mark.slow
def test_import_names_all_that_is_missing():
    """Python alone would name the first symbol, and neither its package nor what to install."""
    program = """
from emerging_optimizers.orthogonalized_optimizers import muon, muon_utils
del muon_utils.batched_newton_schulz_step, muon.MuonScaleT
import megatron_muon.fsdp2
"""
    done = run_command(sys.executable, "-c", program)
    assert done.returncode == 1
    for name in ("muon.MuonScaleT", "muon_utils.batched_newton_schulz_step"):
        assert f"orthogonalized_optimizers.{name}: expected it for" in done.stderr


WITHOUT_ABSL = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "absl":
            raise ModuleNotFoundError("No module named 'absl'", name="absl")
sys.meta_path.insert(0, Finder())
"""
NO_ABSL = r"got ModuleNotFoundError\(.No module named 'absl'.\). Install what it needs, as absl-py"
NO_DOCSTRING = r"got AttributeError\(.'NoneType' object has no attribute 'format'.\). Install"


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("options", "before", "does", "said"),
    [
        ((), WITHOUT_ABSL, "import megatron_muon; megatron_muon.enable()", NO_ABSL),
        (("-OO",), "", "import megatron_muon.fsdp2", NO_DOCSTRING),
    ],
)
@pytest.mark.slow
def test_error_of_an_import_replaces_its_consequences(options, before, does, said):
    """Without absl-py ten symbols of the right release were missing, and absl was not named."""
    done = run_command(sys.executable, *options, "-c", before + does)
    assert done.returncode == 1
    assert re.search(rf"emerging-optimizers \S+: expected its import to work, {said}", done.stderr)
    assert "got none in" not in done.stderr


def _build_on_a_torch_without(name: str) -> str:
    from megatron_muon.fsdp2 import Muon

    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 1:
        delattr(placement_types, name)
    try:
        Muon([torch.nn.Parameter(torch.ones(2, 2))])
    except RuntimeError as error:
        return str(error)
    return "built"


@pytest.mark.ranks
def test_construction_is_refused_on_all_ranks():
    """Even if one node alone has another torch."""
    for said in run_ranks(2, _build_on_a_torch_without, "_StridedShard").check().results:
        assert "rank 1: torch.distributed.tensor.placement_types._StridedShard: expected" in said
        assert "No optimizer was built." in said


def _step_later_release() -> tuple[list[bool], str]:
    """Compare rows with those of the later release's Muon, and build with too few steps."""
    pretend_emerging_optimizers_0_5()
    from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon

    from megatron_muon.fsdp2 import ExchangeSettings, Muon

    init_group()
    settings: dict[str, Any] = {
        "lr": 0.02,
        "coefficient_type": "cubic5",
        "fp32_matmul_prec": "highest",
    }
    exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
    sharded = FSDP2[2]["uneven"]()
    params = [each.param for each in sharded]
    wholes = [torch.nn.Parameter(each.whole.clone()) for each in sharded]
    ours = Muon(params, exchange=exchange, **settings)
    theirs = WholeMatrixMuon(wholes, **settings)
    for each, whole in zip(sharded, wholes, strict=True):
        whole.grad = whole.detach().square()
        each.set_grad(whole.grad)
    ours.step()
    theirs.step()
    equal = [
        torch.equal(each.param._local_tensor, each.own(whole.detach()))
        for each, whole in zip(sharded, wholes, strict=True)
    ]
    try:
        Muon(params, num_ns_steps=4, exchange=exchange, **settings)
    except RuntimeError as error:
        return equal, str(error)
    return equal, "built"


@pytest.mark.ranks
def test_later_emerging_optimizers_has_its_own_coefficients():
    """Images of Megatron's main may bring 0.4, whose cubic5 takes five steps and no others."""
    for equal, said in run_ranks(2, _step_later_release).check().results:
        assert len(equal) > 1 and all(equal)
        assert "num_ns_steps: expected a number for cubic5 coefficients, got 4" in said
        assert "No optimizer was built." in said


def _step_lion() -> int:
    pretend_emerging_optimizers_0_5()
    from megatron_muon.step.lion import FSDPLion

    param = torch.nn.Parameter(torch.ones(3))
    lion = FSDPLion([param])
    for _ in range(3):
        param.grad = torch.ones(3)
        lion.step()
    return int(lion.state[param]["step"])


@pytest.mark.ranks
def test_later_lion_counts_its_steps():
    """Checkpoints of 0.4 hold the count; without it a run would go on from step 0."""
    assert run_ranks(1, _step_lion).check().results == [3]


def test_order_of_coefficients_is_asked_of_the_installed_release(monkeypatch):
    """A later release may add a set that repeats its last coefficients; ours must follow."""
    coefficients_of.cache_clear()
    sets = muon_utils._COEFFICIENT_SETS
    monkeypatch.setitem(sets, "cans", sets["quintic"])
    monkeypatch.setitem(sets, "aol", sets["polar_express"])
    assert coefficients_of(7, "cans")[5:] == (sets["quintic"][-1],) * 2
    assert coefficients_of(10, "aol")[8:] == tuple(sets["polar_express"][:2])
    coefficients_of.cache_clear()


def test_steps_that_cannot_be_recorded_are_refused(monkeypatch):
    """A guess of their coefficients would train something else."""
    coefficients_of.cache_clear()
    monkeypatch.setattr(
        muon_utils, "newton_schulz", lambda x, steps, coefficient_type: x * 0.5**steps
    )
    with pytest.raises(ValueError, match="to take 7 steps of three coefficients for quintic"):
        coefficients_of(7, "quintic")
    coefficients_of.cache_clear()
