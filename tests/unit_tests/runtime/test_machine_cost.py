# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""All ranks plan with the same costs: of their nodes, of a table, or measured just now."""

import dataclasses
import json
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group

pytestmark = pytest.mark.ranks

# Two shapes of one block, and the blocks of query, key and value, 2 : 1 : 1 of 32 rows.
CASES = [(24, [31, 17]), (8, [16, 16]), (24, [7, 25])]
SHAPES = [[8, 24], [8, 32], [16, 24], [24, 48]]


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


def _measured(cost_model: str, wire: str, precision: str) -> list[Any]:
    import torch

    init_group()
    settings = {"fp32_matmul_prec": precision}
    before = torch.get_rng_state()
    exchange = {"cost_model": cost_model, "wire": wire}
    built = build_optimizers(2, settings, exchange, cases=CASES)
    # Tensor-parallel ranks have generators in the same state, and only one rank measures.
    is_untouched = torch.equal(before, torch.get_rng_state())
    # The plan is one that steps.
    built.set_gradients(0)
    built.sharded.step()
    return [is_untouched, dataclasses.asdict(built.sharded.compute.plans[0].cost.measured)]


@pytest.mark.parametrize(
    ("wire", "precision"), [("bf16", "medium"), ("fp32", "medium"), ("fp32", "highest")]
)
def test_each_shape_is_timed_once_and_shared(wire, precision, tmp_path):
    """On one rank: two that measured would differ. What was written can be read instead."""
    path = tmp_path / "times.json"
    first = run_ranks(2, _measured, f"measure:{path}", wire, precision).check().results
    assert first[0] == first[1]
    is_untouched, table = first[0]
    assert is_untouched
    # What a step runs with, not what it was set to before.
    assert table["precision"] == precision
    assert [[time["rows"], time["cols"]] for time in table["shapes"]] == SHAPES
    assert json.loads(path.read_text()) == table
    assert run_ranks(2, _measured, f"file:{path}", wire, precision).check().results == first


def test_table_decides_who_owns_what(tmp_path):
    """The smallest matrix takes as long as all others: its owner gets nothing else."""
    times = {tuple(shape): 20.0 for shape in SHAPES} | {(8, 32): 100.0}
    shapes = [
        {"rows": rows, "cols": cols, "stack": 1, "milliseconds": ms}
        for (rows, cols), ms in times.items()
    ]
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"num_ns_steps": 5, "precision": "medium", "shapes": shapes}))
    (owners, other) = run_ranks(2, _owners, f"file:{path}").check().results
    assert owners == other
    assert owners[0] == owners[2] != owners[1]
    # By its operations, the first takes as long as both others.
    (by_rate, _) = run_ranks(2, _owners, "").check().results
    assert by_rate[0] != by_rate[2]


def _owners(cost_model: str) -> list[list[int]]:
    init_group()
    built = build_optimizers(2, exchange={"cost_model": cost_model}, cases=CASES)
    return [list(owners) for owners in built.sharded.compute.plans[0].owners]


def _build_from(path: str) -> None:
    init_group()
    build_optimizers(2, exchange={"cost_model": f"file:{path}"}, cases=CASES)


@pytest.mark.parametrize(
    ("shapes", "precision", "said"),
    [
        (SHAPES[:-1], "medium", "cost table: expected a time of 24 x 48 matrices, got none"),
        (SHAPES, "high", "expected times in medium precision (--muon-fp32-matmul-prec), got high"),
        (None, "medium", "times.json: expected JSON with num_ns_steps, precision, and shapes of"),
    ],
    ids=["shape", "precision", "file"],
)
def test_table_that_does_not_fit_is_an_error_on_all(shapes, precision, said, tmp_path):
    """The rank that reads it would otherwise end alone, and the other one wait for it."""
    path = tmp_path / "times.json"
    if shapes is not None:
        times = [{"rows": r, "cols": c, "stack": 1, "milliseconds": 1.0} for r, c in shapes]
        stored = {"num_ns_steps": 5, "precision": precision, "shapes": times}
        path.write_text(json.dumps(stored))
    run = run_ranks(2, _build_from, str(path), timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "rank 0: " in output and said in output


def test_table_of_other_segments_does_not_fit():
    """Another set of coefficients makes the Gram form do other work for the same shape."""
    import torch

    from megatron_muon.plan.cost import CostModel
    from megatron_muon.plan.cost_table import CostTable, ShapeTime
    from megatron_muon.runtime.machine_cost import _table_problems

    cost = CostModel(backends=("gram",), segments=(2, 3))
    times = (ShapeTime(8, 8, 1, 1.0, "gram"),)
    precision = torch.get_float32_matmul_precision()
    for segments, problems in [((2, 3), 0), ((1, 2, 2), 1), ((), 1)]:
        found = _table_problems(CostTable(5, precision, times, segments), [(8, 8)], cost)
        assert len(found) == problems
        assert all(f"got {segments or 'none'}" in problem for problem in found)


def _fail_to_measure() -> None:
    import torch

    from megatron_muon.runtime import machine_cost

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation.")

    machine_cost.measure_newton_schulz = fail
    init_group()
    build_optimizers(2, exchange={"cost_model": "measure"}, cases=CASES)


def test_measurement_that_fails_is_an_error_on_all():
    """The rank that measures alone would otherwise end alone."""
    run = run_ranks(2, _fail_to_measure, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "rank 0: cost model: CUDA out of memory." in output
        assert "or leave measured times out. No optimizer was built." in output


def _build_with(newton_schulz: str, rank_without: int | None) -> list[Any]:
    """Build, on one rank as if it lacked what the Gram form needs."""
    import torch.distributed as dist

    from megatron_muon.newton_schulz.gram import Gram

    init_group()
    if dist.get_rank() == rank_without:
        Gram.problems = lambda *_: ["expected a thing, got none"]
    built = build_optimizers(2, exchange={"newton_schulz": newton_schulz}, cases=CASES)
    cost = built.sharded.compute.plans[0].cost
    return [list(cost.backends), list(cost.segments or ())]


@pytest.mark.parametrize(
    ("newton_schulz", "rank_without", "expected"),
    [
        ("standard", None, [["standard"], []]),
        ("gram", None, [["gram"], [2, 3]]),
        ("auto", None, [["standard", "gram"], [2, 3]]),
        ("auto", 1, [["standard"], []]),
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


def _measured_backends() -> list[list[Any]]:
    init_group()
    exchange = {"cost_model": "measure", "newton_schulz": "auto"}
    built = build_optimizers(2, exchange=exchange, cases=CASES)
    table = built.sharded.compute.plans[0].cost.measured
    return sorted([time.backend, time.rows, time.cols] for time in table.shapes)


def test_every_backend_is_timed_on_every_shape():
    """Auto then chooses by times."""
    expected = [[name, *shape] for name in ("gram", "standard") for shape in SHAPES]
    assert run_ranks(2, _measured_backends).check().results == [expected] * 2


def _build_differently() -> None:
    import torch.distributed as dist

    init_group()
    exchange = {"newton_schulz": ("standard", "gram")[dist.get_rank()]}
    build_optimizers(2, exchange=exchange, cases=CASES)


def test_ranks_with_other_settings_are_an_error_on_all():
    """Settings decide which collectives follow: each rank would wait in another one."""
    run = run_ranks(2, _build_differently, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "kinds of Muon parameters, and settings: expected the same on all ranks" in output
        assert "newton_schulz='gram'" in output


def _build_with_a_broken_kernel(fails: bool) -> list[str]:
    """Build where the Gram form stands for a kernel, which raises on rank 1."""
    import torch.distributed as dist

    from megatron_muon.newton_schulz.gram import Gram

    class KernelError(Exception):
        pass

    def run(*_args: Any, **_options: Any) -> None:
        raise KernelError("strides must be 16-byte aligned")

    init_group()
    Gram.reference = "standard"
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
