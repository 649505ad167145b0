# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""All ranks plan with the same costs: nodes, rates and backends."""

import os
from typing import Any
from unittest import mock

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

# Two shapes of one block, and the blocks of query, key and value, 2 : 1 : 1 of 32 rows.
CASES = [(24, [31, 17]), (8, [16, 16]), (24, [7, 25])]


def _ranks_per_node(cost_model: str, sizes: list[str], _expected: int) -> int:
    import torch.distributed as dist

    size = sizes[dist.get_rank()]
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": size} if size else {}):
        if not size:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        built = build_optimizers(2, exchange={"cost_model": cost_model}, cases=CASES)
    return built.sharded.engine.plans[0].cost.ranks_per_node


def test_ranks_a_node_are_those_of_the_launcher():
    """The same on all ranks; a user's figure wins; without any, the default of eight."""
    cases = [
        ("", ["4", "4"], 4),
        ("", ["6", "4"], 2),
        ("", ["4", ""], 8),
        ("", ["4", "all"], 8),
        ("", ["", ""], 8),
        ("ranks_per_node=2", ["4", "4"], 2),
    ]
    expected = [each for *_, each in cases]
    assert run_ranks(2, each_of, _ranks_per_node, cases).check().results == [expected] * 2


def _build(newton_schulz: list[str], gram: list[str], settings: list[dict[str, Any]]) -> Any:
    """Build with attributes of the Gram form replaced; return the backends, or the error.

    Args:
        newton_schulz: The choice of each rank.
        gram: By rank, the attributes.
        settings: By rank, settings of the optimizer.
    """
    import torch.distributed as dist

    from megatron_muon.newton_schulz.gram import Gram
    from megatron_muon.newton_schulz.standard import Standard

    class KernelError(Exception):
        pass

    def run(*_args: Any, **_options: Any) -> None:
        raise KernelError("strides must be 16-byte aligned")

    replacements: dict[str, dict[str, Any]] = {
        "lacks": {"problems": lambda *_: ["expected a thing, got none"]},
        "compared": {"reference": Standard},
        "fails": {"reference": Standard, "run": run},
        "": {"name": "gram"},
    }
    rank = dist.get_rank()
    exchange = {"newton_schulz": newton_schulz[rank]}
    with mock.patch.multiple(Gram, **replacements[gram[rank]]):
        try:
            built = build_optimizers(2, settings[rank], exchange, cases=CASES)
        except RuntimeError as error:
            return str(error)
    plan = built.sharded.engine.plans[0]
    return [list(plan.cost.backends), [plan.backend(i, 0) for i, _ in enumerate(plan.matrices)]]


def _same(newton_schulz: str, gram: tuple[str, str] = ("", "")) -> list[Any]:
    return [[newton_schulz] * 2, gram, [{}, {}]]


def test_ranks_use_the_backends_that_all_of_them_have():
    """Plans are one: auto leaves out what a rank lacks."""
    cases = [
        _same("standard"),
        _same("gram"),
        _same("auto"),
        _same("auto", ("", "lacks")),
        _same("gram", ("compared", "compared")),
    ]
    for found in run_ranks(2, each_of, _build, cases).check().results:
        assert [backends for backends, _ in found] == [
            ["standard"],
            ["gram"],
            ["standard", "gram"],
            ["standard"],
            ["gram"],
        ]
        assert found[1][1] == found[4][1] == ["gram"] * 3


def test_setting_that_differs_on_one_rank_is_an_error_on_all():
    """Never another backend in its place without a word, nor another scale on one rank."""
    lacking = "Use --muon-fsdp-newton-schulz standard, or auto for what this machine can"
    differ = "Muon settings: expected the same on all ranks"
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (_same("symmetric"), (lacking, "Newton-Schulz symmetric: expected a GPU, got cpu ranks")),
        (
            _same("gram_symmetric"),
            (lacking, "Newton-Schulz gram_symmetric: expected a GPU, got cpu ranks"),
        ),
        (
            _same("gram", ("", "lacks")),
            (lacking, "rank 1: Newton-Schulz gram: expected a thing, got none"),
        ),
        # Each rank would wait in another collective.
        ([["standard", "gram"], ("", ""), [{}, {}]], (differ, "newton_schulz='gram'")),
        # Such ranks once trained on under Megatron.
        (
            [["standard"] * 2, ("", ""), [{"extra_scale_factor": each} for each in (1.0, 0.2)]],
            (differ, "spectral 0.2"),
        ),
        # At construction, where kernels are compared with torch's products.
        (
            _same("gram", ("compared", "fails")),
            ("rank 1: KernelError: strides must be 16-byte aligned",),
        ),
    ]
    for errors in run_ranks(2, each_of, _build, [case for case, _ in cases]).check().results:
        for error, (_, parts) in zip(errors, cases, strict=True):
            assert all(part in error for part in parts), error
