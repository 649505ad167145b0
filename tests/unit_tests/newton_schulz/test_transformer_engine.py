# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Contract of the backend of split matrices, with a stand-in for Transformer Engine."""

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import cusolvermp
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group, split_always
from helpers.stacks import orthogonalized, settings

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.transformer_engine import TransformerEngine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# CPU ranks would stack whole matrices, faster than by calls of one.
UNSTACKED = {"cost_model": "stack_tiles=1"}


def _steps() -> list[Any]:
    """Step with torch's products and with the stand-in; return differences and its calls."""
    import torch.distributed as dist

    cusolvermp.install()
    TransformerEngine.problems = lambda *_: []  # a CPU is one
    init_group()
    found = []
    for backend in ("standard", "transformer_engine"):
        exchange = {"comm_dtype": "bf16", "newton_schulz": backend, **UNSTACKED}
        with split_always(4):
            optimizers = build_optimizers(4, {"fp32_matmul_prec": "medium"}, exchange)
        for step in range(2):
            optimizers.set_gradients(step)
            optimizers.sharded.step()
        found.append(optimizers.state())
    # Parts and whole matrices add up in another order, whose rounding depends on the CPU: a unit in
    # the last place of a weight was seen. Updates are of the size of the learning rate, 0.02.
    differences = sum(
        not torch.allclose(ours, expected, rtol=3e-7, atol=1e-7)
        for params, references in zip(found[1], found[0], strict=True)
        for ours, expected in zip(params, references, strict=True)
    )
    dist.destroy_process_group()
    return [differences, cusolvermp.calls]


@pytest.mark.ranks
def test_split_matrices_go_through_one_call():
    """With the results of torch's products; contexts live as long as their groups."""
    for differences, calls in run_ranks(4, _steps).check().results:
        num_groups = calls.count("create")
        assert differences == 0 and num_groups > 0
        assert calls[:num_groups] == ["create"] * num_groups
        assert calls[-num_groups:] == ["destroy"] * num_groups
        assert set(calls[num_groups:-num_groups]) == {"newton_schulz"}


def _zeros_and_a_tall_matrix() -> list[bool]:
    import torch.distributed as dist

    cusolvermp.install()
    init_group()
    group = dist.group.WORLD
    # Dense matrices and experts may have the same owners.
    for _ in range(2):
        BACKENDS["transformer_engine"].connect(group)
    options = {"whole_shape": (32, 8), "parts_group": group}
    zeros = torch.zeros(1, 16, 8, dtype=torch.bfloat16)
    drawn = torch.randn(1, 16, 8).div(32).bfloat16()
    before = drawn.clone()
    found = orthogonalized(drawn, "transformer_engine", **options)
    broken = drawn * (torch.nan if dist.get_rank() else 1)
    result = [
        not orthogonalized(zeros, "transformer_engine", **options).any(),
        torch.equal(found, orthogonalized(drawn, "standard", **options)),
        torch.equal(drawn, before),
        bool(orthogonalized(broken, "transformer_engine", **options).isnan().all()),
    ]
    dist.destroy_process_group()
    return [*result, cusolvermp.calls[:2] == ["create", "newton_schulz"]]


@pytest.mark.ranks
def test_zeros_stay_zeros_and_what_comes_in_stays_as_it_is():
    """A tall matrix is transposed on the way; NaN is not taken for zero."""
    assert run_ranks(2, _zeros_and_a_tall_matrix).check().results == [[True] * 5] * 2


def _build_with_a_wrong_result() -> None:
    import torch.distributed as dist

    right = cusolvermp.newton_schulz

    def wrong(part, context, num_iterations, coefficients):
        right(part, context, num_iterations, coefficients)
        if dist.get_rank() == 1:
            part.mul_(0.5)

    cusolvermp.newton_schulz = wrong
    cusolvermp.install()
    TransformerEngine.problems = lambda *_: []
    init_group()
    with split_always(4):
        build_optimizers(4, exchange={"newton_schulz": "transformer_engine", **UNSTACKED})


@pytest.mark.ranks
def test_result_that_is_wrong_on_one_rank_is_an_error_on_all():
    """At construction; the rank first joins the comparisons of the others."""
    run = run_ranks(4, _build_with_a_wrong_result, timeout_s=60.0)
    assert run.exit_codes == [1] * 4
    for output in run.outputs:
        assert "transformer_engine: expected results within 0.05 of those of standard" in output
        assert "No optimizer was built" in output


def test_what_a_machine_lacks_is_said(monkeypatch):
    """By name, with what was expected and what came."""
    lacking = TransformerEngine().problems(settings(), CPU)
    assert lacking[0].startswith("expected Transformer Engine 2.19 or later, got ModuleNotFound")
    assert lacking[1] == "expected a GPU, got cpu ranks"
    with mock.patch.dict("sys.modules"):
        cusolvermp.install()
        import transformer_engine

        assert TransformerEngine().problems(settings(), GPU) == []
        transformer_engine.__version__ = "2.18.1+abc"
        (old,) = TransformerEngine().problems(settings(), GPU)
        assert old == "expected Transformer Engine 2.19 or later, got 2.18.1+abc"

    def refuse(self, group):
        raise RuntimeError("newton_schulz requires building with NVTE_WITH_CUSOLVERMP=1\nC++ trace")

    monkeypatch.setattr(cusolvermp.CusolverMpCtx, "__init__", refuse)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda *_: None)
    with mock.patch.dict("sys.modules"):
        cusolvermp.install()
        with pytest.raises(RuntimeError, match="built with NVTE_WITH_CUSOLVERMP=1, and an NCCL"):
            TransformerEngine().connect(None)
