# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""All ranks plan with the same costs: nodes, rates and backends."""

from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

# Two shapes of one block, and the blocks of query, key and value, 2 : 1 : 1 of 32 rows.
CASES = [(24, [31, 17]), (8, [16, 16]), (24, [7, 25])]


def _ranks_per_node(cost_model: str, sizes: list[str]) -> int:
    import os

    import torch.distributed as dist

    init_group()
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if sizes[dist.get_rank()]:
        os.environ["LOCAL_WORLD_SIZE"] = sizes[dist.get_rank()]
    built = build_optimizers(2, exchange={"cost_model": cost_model}, cases=CASES)
    return built.sharded.compute.plans[0].cost.ranks_per_node


@pytest.mark.parametrize(
    ("cost_model", "sizes", "expected"),
    [
        ("", ["4", "4"], 4),
        ("", ["6", "4"], 2),
        ("", ["4", ""], 8),
        ("", ["4", "all"], 8),
        ("", ["", ""], 8),
        ("ranks_per_node=2", ["4", "4"], 2),
    ],
    ids=["launcher", "divisor", "not_everywhere", "no_number", "unknown", "given"],
)
def test_ranks_a_node_are_those_of_the_launcher(cost_model, sizes, expected):
    """The same on all ranks; a user's figure wins; without any, the default of eight."""
    assert run_ranks(2, _ranks_per_node, cost_model, sizes).check().results == [expected] * 2


def _build_with(newton_schulz: str, rank_without: int | None) -> list[Any]:
    """Build, on one rank as if it lacked what the Gram form needs."""
    import torch.distributed as dist

    from megatron_muon.newton_schulz.gram import Gram

    init_group()
    if dist.get_rank() == rank_without:
        Gram.problems = lambda *_: ["expected a thing, got none"]
    built = build_optimizers(2, exchange={"newton_schulz": newton_schulz}, cases=CASES)
    cost = built.sharded.compute.plans[0].cost
    return list(cost.backends)


@pytest.mark.parametrize(
    ("newton_schulz", "rank_without", "expected"),
    [
        ("standard", None, ["standard"]),
        ("gram", None, ["gram"]),
        ("auto", None, ["standard", "gram"]),
        ("auto", 1, ["standard"]),
    ],
)
def test_ranks_use_the_backends_that_all_of_them_have(newton_schulz, rank_without, expected):
    """Plans are one: auto leaves out what a rank lacks."""
    run = run_ranks(2, _build_with, newton_schulz, rank_without).check()
    assert run.results == [expected] * 2


@pytest.mark.parametrize(
    ("newton_schulz", "rank_without", "said"),
    [
        ("symmetric", None, "Newton-Schulz symmetric: expected a GPU, got cpu ranks"),
        ("gram_symmetric", None, "Newton-Schulz gram_symmetric: expected a GPU, got cpu ranks"),
        ("gram", 1, "rank 1: Newton-Schulz gram: expected a thing, got none"),
    ],
)
def test_backend_that_a_rank_lacks_is_an_error_on_all(newton_schulz, rank_without, said):
    """Never another one in its place without a word."""
    run = run_ranks(2, _build_with, newton_schulz, rank_without, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert said in output
        assert "Use --muon-fsdp-newton-schulz standard, or auto for what this machine can" in output


def _build_differently(setting: str) -> None:
    import torch.distributed as dist

    init_group()
    rank = dist.get_rank()
    exchange, settings = {}, {}
    if setting == "exchange":
        # Each rank would wait in another collective.
        exchange = {"newton_schulz": ("standard", "gram")[rank]}
    else:
        settings = {"extra_scale_factor": (1.0, 0.2)[rank]}
    build_optimizers(2, settings, exchange, cases=CASES)


@pytest.mark.parametrize(
    ("setting", "said"), [("exchange", "newton_schulz='gram'"), ("scale", "spectral 0.2")]
)
def test_ranks_with_other_settings_are_an_error_on_all(setting, said):
    """Ranks with another scale of results once trained on under Megatron."""
    run = run_ranks(2, _build_differently, setting, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "Muon settings: expected the same on all ranks" in output
        assert said in output


def _build_with_a_broken_kernel(fails: bool) -> list[str]:
    """Build where the Gram form stands for a kernel, which raises on rank 1."""
    import torch.distributed as dist

    from megatron_muon.newton_schulz.gram import Gram
    from megatron_muon.newton_schulz.standard import Standard

    class KernelError(Exception):
        pass

    def run(*_args: Any, **_options: Any) -> None:
        raise KernelError("strides must be 16-byte aligned")

    init_group()
    Gram.reference = Standard
    if fails and dist.get_rank() == 1:
        Gram.run = run
    built = build_optimizers(2, exchange={"newton_schulz": "gram"}, cases=CASES)
    plan = built.sharded.compute.plans[0]
    return [plan.backend(index, 0) for index, _ in enumerate(plan.matrices)]


def test_kernel_that_fails_on_one_rank_is_an_error_on_all():
    """At construction, where kernels are compared with torch's products."""
    assert run_ranks(2, _build_with_a_broken_kernel, False).check().results[0] == ["gram"] * 3
    run = run_ranks(2, _build_with_a_broken_kernel, True, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "rank 1: KernelError: strides must be 16-byte aligned" in output
