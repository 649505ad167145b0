# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""All ranks plan with the same costs: nodes, rates and backends."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of

from megatron_muon.newton_schulz.gram import Gram
from megatron_muon.newton_schulz.standard import Standard

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

# Two shapes of one block, and the blocks of query, key and value, 2 : 1 : 1 of 32 rows.
MATRICES = [(24, [31, 17]), (8, [16, 16]), (24, [7, 25])]


def _ranks_per_node(cost_model: str, sizes: list[str]) -> int:
    size = sizes[dist.get_rank()]
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": size} if size else {}):
        if not size:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        built = build_optimizers(2, exchange={"cost_model": cost_model}, cases=MATRICES)
    return built.sharded.engine.plans[0].cost.ranks_per_node


def test_ranks_a_node_are_those_of_the_launcher():
    """The same on all ranks; a user's figure wins; without any, the default of eight."""
    cases = [
        ("", ["4", "4"]),
        ("", ["6", "4"]),
        ("", ["4", ""]),
        ("", ["4", "all"]),
        ("", ["", ""]),
        ("ranks_per_node=2", ["4", "4"]),
    ]
    run = run_ranks(2, each_of, _ranks_per_node, cases).check()
    assert run.results == [[4, 2, 8, 8, 8, 2]] * 2


def _fail(*_args: Any, **_options: Any) -> None:
    raise ArithmeticError("strides must be 16-byte aligned")


# The Gram form of a rank: that of the package, without a thing it needs, or with kernels of its
# own, which are compared with torch's products at construction.
GRAM: dict[str, dict[str, Any]] = {
    "": {"name": "gram"},
    "lacks": {"problems": lambda *_: ["expected a thing, got none"]},
    "compared": {"reference": Standard},
    "fails": {"reference": Standard, "run": _fail},
}


class Case(NamedTuple):
    """Choices of two ranks, in their order.

    Args:
        choices: Of Newton-Schulz.
        gram: Names in ``GRAM``.
        settings: Of the optimizer.
        exchange: Others of the exchange.
    """

    choices: Sequence[str]
    gram: Sequence[str] = ("", "")
    settings: Sequence[dict[str, Any]] = ({}, {})
    exchange: Sequence[dict[str, Any]] = ({}, {})


def _build(*case: Any) -> Any:
    """Return the backends of the plan and those of its matrices, or the error."""
    choice, gram, settings, exchange = (each[dist.get_rank()] for each in case)
    with mock.patch.multiple(Gram, **GRAM[gram]):
        try:
            exchange = {"newton_schulz": choice, **exchange}
            built = build_optimizers(2, settings, exchange, cases=MATRICES)
        except RuntimeError as error:
            return str(error)
    plan = built.sharded.engine.plans[0]
    return [list(plan.cost.backends), [plan.backend(i, 0) for i, _ in enumerate(plan.matrices)]]


def test_ranks_use_the_backends_that_all_of_them_have():
    """Plans are one: auto leaves out what a rank lacks."""
    cases = [
        Case(["standard"] * 2),
        Case(["gram"] * 2),
        Case(["auto"] * 2),
        Case(["auto"] * 2, ["", "lacks"]),
        Case(["gram"] * 2, ["compared", "compared"]),
    ]
    expected = [["standard"], ["gram"], ["standard", "gram"], ["standard"], ["gram"]]
    for found in run_ranks(2, each_of, _build, cases).check().results:
        assert [backends for backends, _ in found] == expected
        assert found[1][1] == found[4][1] == ["gram"] * 3


def _differing(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def test_setting_that_differs_on_one_rank_is_an_error_on_all():
    """Never another backend in its place without a word, nor another scale on one rank."""
    standard = ["standard"] * 2
    cases = {
        "symmetric: expected a GPU, got cpu ranks": Case(["symmetric"] * 2),
        "rank 1: Newton-Schulz gram: expected a thing, got none": Case(["gram"] * 2, ["", "lacks"]),
        # At construction, where kernels are compared with torch's products.
        "rank 1: ArithmeticError: strides must be": Case(["gram"] * 2, ["compared", "fails"]),
        # Each rank would wait in another collective.
        "newton_schulz='gram'": Case(["standard", "gram"]),
        "staging_bytes=2000000": Case(
            standard, exchange=_differing("staging_bytes", 10**6, 2 * 10**6)
        ),
        # Such ranks once trained on under Megatron.
        "spectral 0.2": Case(standard, settings=_differing("extra_scale_factor", 1.0, 0.2)),
    }
    for errors in run_ranks(2, each_of, _build, list(cases.values())).check().results:
        for error, expected in zip(errors, cases, strict=True):
            assert expected in error
