# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Measured times: the file, what it must hold, and that costs follow them."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from megatron_muon.plan.cost_table import CostSource, CostTable, ShapeTime

from megatron_muon.plan.cost import CostModel

TABLE = CostTable(5, "medium", (ShapeTime(64, 256, 4, 2.0), ShapeTime(128, 128, 1, 3.0)))


def test_file_is_read_back_as_written(tmp_path):
    """The same table, in JSON that a user can edit."""
    TABLE.write(tmp_path / "table.json")
    assert CostTable.read(tmp_path / "table.json") == TABLE


def test_costs_are_those_of_the_table():
    """By matrix of a stack, by step; the same for a transposed matrix, and a share for a part."""
    cost = CostModel(measured=TABLE, all_reduce_us=0, gbps=1e9)
    assert cost.newton_schulz_seconds(64, 256) == pytest.approx(0.5e-3)
    assert cost.newton_schulz_seconds(256, 64) == pytest.approx(0.5e-3)
    longer = dataclasses.replace(cost, num_ns_steps=10)
    assert longer.newton_schulz_seconds(64, 256) == pytest.approx(1e-3)
    share = cost.work(64, 256, 2).flops / cost.work(64, 256).flops
    assert cost.newton_schulz_seconds(64, 256, 2) == pytest.approx(0.5e-3 * share)


def test_shape_that_is_missing_is_named():
    """With the shapes that there are."""
    cost = CostModel(measured=TABLE)
    with pytest.raises(
        ValueError, match="of 64 x 64 matrices, got times of 64 x 256 matrices, 128"
    ):
        cost.newton_schulz_seconds(64, 64)
    assert TABLE.missing([(256, 64), (64, 64), (128, 128)], ["standard"]) == [("standard", 64, 64)]


def test_later_times_replace_earlier_ones():
    """Experts and dense matrices are measured one after the other, into one file."""
    later = CostTable(5, "medium", (ShapeTime(256, 64, 1, 1.0), ShapeTime(32, 32, 1, 0.1)))
    assert TABLE.joined(later) == CostTable(5, "medium", (TABLE.shapes[1], *later.shapes))
    for other in (CostTable(6, "medium", ()), CostTable(5, "high", ())):
        with pytest.raises(ValueError, match="got times of 5 in medium. Write to another file"):
            TABLE.joined(other)


def _stored(num_ns_steps: int = 5, twice: bool = False, **changes: float) -> str:
    shapes = [{**vars(TABLE.shapes[0]), **changes}, *([vars(TABLE.shapes[0])] if twice else [])]
    return json.dumps({"num_ns_steps": num_ns_steps, "precision": "medium", "shapes": shapes})


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("not json", "got JSONDecodeError"),
        ("[]", "got TypeError"),
        ('{"num_ns_steps": 5}', "got KeyError: 'shapes'"),
        ('{"num_ns_steps": 5, "shapes": [{"rows": 8}]}', "got TypeError: "),
        ('{"num_ns_steps": 5, "shapes": []}', "got KeyError: 'precision'"),
        (_stored(num_ns_steps=0), "expected a positive num_ns_steps, got 0"),
        (_stored(num_ns_steps=True), "expected a positive num_ns_steps, got True"),
        (_stored(stack=0), "expected a positive number of stack, got 0"),
        (_stored(rows=8.5), "expected a positive number of rows, got 8.5"),
        (_stored(milliseconds=math.inf), "expected a positive number of milliseconds, got inf"),
        (
            _stored(rows=256, cols=64, twice=True),
            "got several of 64 x 256 matrices or their transpose",
        ),
    ],
)
def test_file_that_is_no_table_is_refused(stored, said, tmp_path):
    """What was expected, and what it was."""
    (tmp_path / "table.json").write_text(stored)
    with pytest.raises(ValueError, match="cost table") as error:
        CostTable.read(tmp_path / "table.json")
    assert said in str(error.value)


def test_missing_file_is_refused(tmp_path):
    """With its path."""
    with pytest.raises(ValueError, match=r"cost table .*none\.json: .* got FileNotFoundError"):
        CostTable.read(tmp_path / "none.json")


def test_source_is_read_from_the_flag():
    """Rates, and at most one source of measured times."""
    assert CostSource.parse("") == CostSource("")
    assert CostSource.parse("gbps=3,tflops=2") == CostSource("gbps=3,tflops=2")
    assert CostSource.parse("measure,gbps=3") == CostSource("gbps=3", measures=True)
    assert CostSource.parse("measure:/a/b.json") == CostSource("", True, Path("/a/b.json"))
    assert CostSource.parse("file:t.json,gbps=3") == CostSource("gbps=3", False, Path("t.json"))
    for text in ("file:", "file", "measure,file:t.json"):
        with pytest.raises(ValueError, match="expected one of measure, measure:PATH and file:PATH"):
            CostSource.parse(text)
