# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Releases that lack a name that is relied on are refused by it; others work."""

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from helpers.fsdp2_models import FSDP2
from helpers.later_releases import pretend_emerging_optimizers_0_5
from helpers.ranks import on_ranks, run_ranks
from helpers.whole_matrices import WholeMuon, differences
from torch.distributed.tensor import placement_types

from megatron_muon.fsdp2 import ExchangeSettings, Muon
from megatron_muon.newton_schulz.settings import coefficients_of
from megatron_muon.step.dependencies import missing_names
from megatron_muon.step.lion import FSDPLion


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("owner", "name", "package"),
    [
        (placement_types, "_StridedShard", "torch "),
        (muon_utils, "newton_schulz_step", "emerging-optimizers "),
    ],
)
def test_missing_name_is_an_error_with_its_package(owner, name, package, monkeypatch):
    """A missing name is an error with its package, and enable() changes nothing."""
    from megatron_muon import enable, is_enabled
    from megatron_muon.mcore.versions import IncompatibleMegatronError

    assert missing_names() == []
    monkeypatch.delattr(owner, name)
    (error,) = missing_names()
    assert f"{name}: expected it, got none in {package}" in error
    with pytest.raises(IncompatibleMegatronError, match="nothing was changed") as caught:
        enable()
    assert error in str(caught.value) and not is_enabled()


def _import_error(package: str, error: Exception | None) -> list[str]:
    """Import as a new process does, though the server of ranks has imported all."""
    from emerging_optimizers.orthogonalized_optimizers import muon

    def find_spec(name: str, *_: Any) -> None:
        if error is not None and name.partition(".")[0] == package:
            raise error

    forgotten = {"megatron_muon"}
    if error is None:
        del muon_utils.batched_newton_schulz_step, muon.MuonScaleT
    else:
        forgotten |= {package, "emerging_optimizers"}
    for name in list(sys.modules):
        if name.partition(".")[0] in forgotten:
            del sys.modules[name]
    sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))
    said = []
    for call in (
        lambda: import_module("megatron_muon.fsdp2"),
        lambda: import_module("megatron_muon").enable(),
    ):
        try:
            call()
        # Classes of the package were imported anew.
        except Exception as raised:
            said.append(str(raised))
    return said


@pytest.mark.megatron
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("package", "error", "expected"),
    [
        ("", None, ["muon.MuonScaleT: ", "muon_utils.batched_newton_schulz_step: "]),
        ("absl", ModuleNotFoundError("No module named 'absl'"), ["No module named 'absl'"]),
        # As under python -OO, without docstrings.
        ("emerging_optimizers", AttributeError("no attribute 'format'"), ["attribute 'format'"]),
    ],
)
def test_import_names_all_that_is_missing_or_its_cause(package, error, expected):
    """An import names all missing symbols with their package, or its cause."""
    (found,) = run_ranks(1, _import_error, package, error).check().results
    assert len(found) == 2
    for said in found:
        assert all(text in said for text in expected)
        assert ("absl-py (pip install absl-py)" in said) == (error is not None)
        assert ("expected its import to work" in said) == (error is not None)
        assert ("got none in" in said) == (error is None)


@on_ranks(2)
def test_later_emerging_optimizers_has_its_own_coefficients_and_counts():
    """Coefficients and step counts of a later emerging-optimizers are its own."""
    pretend_emerging_optimizers_0_5()
    settings: Any = {"lr": 0.02, "coefficient_type": "cubic5", "fp32_matmul_prec": "highest"}
    exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
    sharded = FSDP2[2]["uneven"]()
    params = [each.param for each in sharded]
    ours = Muon(params, exchange=exchange, **settings)
    theirs = WholeMuon(sharded, **settings)
    grads = [each.whole.square() for each in sharded]
    for each, grad in zip(sharded, grads, strict=True):
        each.set_grad(grad)
    ours.step()
    theirs.step(grads)
    assert len(sharded) > 1 and differences(sharded, ours, theirs.wholes()) == []
    with pytest.raises(RuntimeError, match="num_ns_steps: expected 5 for cubic5 coefficients, got"):
        Muon(params, num_ns_steps=4, exchange=exchange, **settings)
    param = torch.nn.Parameter(torch.ones(3))
    lion = FSDPLion([param])
    for _ in range(3):
        param.grad = torch.ones(3)
        lion.step()
    assert int(lion.state[param]["step"]) == 3


@pytest.mark.parametrize("coefficient_type", sorted(muon_utils._COEFFICIENT_SETS))
def test_coefficients_are_upstreams_for_every_number_of_steps(monkeypatch, coefficient_type):
    """Coefficients are upstream's for every number of steps."""
    coefficients_of.cache_clear()
    recorded: list[tuple[float, ...]] = []

    def record(x: torch.Tensor, *coefficients: float, **_: object) -> torch.Tensor:
        recorded.append(coefficients)
        return x

    monkeypatch.setattr(muon_utils, "newton_schulz_step", record)
    for steps in range(1, 24):
        recorded.clear()
        try:
            muon_utils.newton_schulz(torch.ones(1, 1), steps, coefficient_type)
        except ValueError:
            with pytest.raises(ValueError, match="num_ns_steps"):
                coefficients_of(steps, coefficient_type)
        else:
            assert list(coefficients_of(steps, coefficient_type)) == recorded, steps


def test_set_of_an_unknown_order_takes_all_its_steps(monkeypatch):
    """A set of coefficients of unknown order takes all its steps and no others."""
    new = [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]
    monkeypatch.setitem(muon_utils._COEFFICIENT_SETS, "new", new)
    assert list(coefficients_of(2, "new")) == new
    for steps in (1, 3):
        with pytest.raises(ValueError, match=f"expected 2 for new coefficients, got {steps}"):
            coefficients_of(steps, "new")
