# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and what they count is right; how fast anything is, they say, not a test."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest
from helpers.idle_commands import FOLDER, IdleCommand, ended
from helpers.ranks import ROOT, launch
from training_log import TrainingLog

from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.assignment import Assignment, matrix_seconds
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import RowLayout, whole_matrix
from megatron_muon.plan.wire import Wire

# What a step may cost at most, by ranks: figures of step_cost.py, which docs/performance.md shows.
# Whoever removes an operation lowers them, here and there; nothing may raise them unseen.
STEP_COST = {
    1: {
        "operations": 3.0,
        "matrix_products": 1.4,
        "collectives": 2,
        "bytes_an_element": 77,
        "host_reads": 1,
    },
    2: {
        "operations": 4.0,
        "matrix_products": 2.3,
        "collectives": 7,
        "bytes_an_element": 77,
        "host_reads": 1,
    },
}


def _benchmark_command(name: str, arguments: str) -> IdleCommand:
    return IdleCommand((sys.executable, str(ROOT / "benchmarks" / name), *arguments.split()))


STEP_ESTIMATE = _benchmark_command("step_estimate.py", "--ranks 2 --steps 1 --variants 2")
PLANNING = _benchmark_command("planning.py", "--preset qwen3-30b-a3b --dp 16 64")
FSDP2_STEP = _benchmark_command(
    "fsdp2_step.py",
    f"--ranks 2 --hidden 16 --layers 1 --rounds 1 --layouts even experts --json {FOLDER}/step.json",
)


def idle_commands(name, params):
    """Yield the benchmark of a test: none looks at a time."""
    commands = {
        test_step_estimate_holds_predictions_against_ranks: STEP_ESTIMATE,
        test_planning_measures_each_number_of_ranks: PLANNING,
        test_fsdp2_step_counts_bytes_and_says_who_fails: FSDP2_STEP,
    }
    for test, command in commands.items():
        if name == test.__name__:
            yield command


@pytest.mark.ranks
def test_optimizer_step_measures_every_peer_and_writes_json(tmp_path):
    """One run, all peers; owner moves fewer bytes than gathering everything to everyone."""
    path = tmp_path / "step.json"
    flags = ["--hidden", "32", "--layers", "2", "--rounds", "2", "--buckets", "3"]
    flags += ["--json", str(path)]
    run = launch(2, flags, script=ROOT / "benchmarks" / "optimizer_step.py").check()
    data = json.loads(path.read_text())
    peers = data["peers"]
    assert set(peers) | set(data["skipped"]) == {
        "adam", "owner", "owner, wire fp32", "all_gather", "layer_wise", "torch.optim.Muon",
        "owner, buckets 3",
    }  # fmt: skip
    assert peers["adam"]["bytes_a_rank"] == 0
    calls = {name: peers[name]["collective_calls"] for name in ("owner", "owner, buckets 3")}
    assert calls["owner, buckets 3"] > calls["owner"]
    assert peers["owner"]["bytes_a_rank"] < peers["owner, wire fp32"]["bytes_a_rank"]
    assert peers["owner, wire fp32"]["bytes_a_rank"] < peers["all_gather"]["bytes_a_rank"]
    for name, peer in peers.items():
        assert peer["step_ms"] > 0
        assert peer["over_adam"] == pytest.approx(peer["step_ms"] / peers["adam"]["step_ms"])
        assert (0 < peer["efficiency"] < 1) == (name != "adam")
    assert "| owner |" in run.outputs[0]


def _train_forked(ranks: int, arguments: Sequence[str]) -> TrainingLog:
    """Train as ``launched_run.train`` does, on forked ranks in place of torchrun's."""
    log = TrainingLog()
    for output in launch(ranks, arguments).check().outputs:
        for line in output.splitlines():
            log.feed(line)
    return log


def _benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a benchmark under another name: modules of the package have the same ones."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = spec_from_file_location(f"{name}_benchmark", ROOT / "benchmarks" / f"{name}.py")
    benchmark = module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark


@pytest.mark.slow
@pytest.mark.ranks
def test_checkpoint_measures_muon_beside_adam(tmp_path, monkeypatch, capsys):
    """Muon keeps one state where Adam keeps two, so its checkpoint is smaller."""
    benchmark = _benchmark("checkpoint", monkeypatch)
    monkeypatch.setattr(benchmark, "train", _train_forked)
    path = tmp_path / "checkpoint.json"
    flags = ["--hidden", "64", "--layers", "1", "--passes", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", *flags])
    assert benchmark.main() == 0
    adam, muon = json.loads(path.read_text()).values()
    assert muon["bytes"] < adam["bytes"]
    assert 0.5 < muon["state_bytes"] / adam["state_bytes"] < 0.9
    assert min(*adam.values(), *muon.values()) > 0
    assert "| FSDP, muon, owner |" in capsys.readouterr().out


def _alternatives(arguments: str) -> dict[str, list[float]]:
    """Run the comparison as a user does, and read its table."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "design_alternatives.py"), *arguments.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    return {row[0]: [float(value.rstrip("%")) for value in row[1:]] for row in rows}


def test_design_alternatives_are_of_the_same_shards():
    """Bounds that hold at any rates: all work on all ranks, all but the largest shards."""
    rows = _alternatives("--preset llama3-8b --dp 8")
    everything, largest, idlest = (
        rows[name]
        for name in ("gather everything to all", "largest holder", "idlest rank, longest first")
    )
    joint = rows["joint, --max-parts 8"]
    assert everything[:2] == [8, 8.0] and everything[3] == 700.0
    assert all(largest[3] <= row[3] for row in rows.values())
    assert largest[4] <= joint[4] <= everything[4]
    assert idlest[1] <= joint[1] < largest[1]
    # The lower bound of the plan report is the largest holder's: 2 bytes there and back.
    report = json.loads(
        subprocess.run(
            [sys.executable, "-m", "megatron_muon.plan", "--preset", "llama3-8b", "--json"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert largest[4] == pytest.approx(report["lower_bound_bytes"] / 2 / 8 / 1e6, abs=0.1)
    assert joint[4] == pytest.approx(report["mean_elements_sent"] / 1e6, abs=0.1)


def test_least_traffic_of_two_matrices_that_one_rank_holds_most_of(monkeypatch):
    """It has both, or one and a half, or one of the two, as far as its load allows."""
    bound = _benchmark("traffic_bound", monkeypatch)
    layout = RowLayout(8, 4, ((0, 6), (6, 8)))
    # Two that lie alike share their regions.
    matrices = [whole_matrix(f"{i}.weight", layout, [[(0,), (1,)]]) for i in range(2)]
    cost = CostModel()
    one_s = matrix_seconds(matrices[0], cost)
    owned_by_both = Assignment(((0,), (1,)), {0: one_s, 1: one_s}, one_s)
    wire = Wire.of("bf16", is_bf16=True)
    plan = ExchangePlan.build(matrices, owned_by_both, cost, wire, staging_bytes=2**31)
    # Elements: 2 rows of 4 go to rank 0 for a matrix that it owns, 6 to rank 1.
    for load, least in ((1.0, 8 + 24), (1.5, 12 + 12), (2.0, 8 + 8)):
        (row,) = bound.moved_by([plan], load)
        assert (row.num_matrices, row.plan, row.largest_holder) == (2, 8 + 24, 8 + 8)
        assert least - 1 <= row.least <= least  # rounded down


def test_least_busiest_rank_by_hand(monkeypatch):
    """One long matrix and short ones, on three ranks; more owners take more work in all."""
    bound = _benchmark("load_bound", monkeypatch)
    long, short = (6.0, 4.0, 3.0), (1.0,)
    # Alone the long one takes 6 seconds on one rank, and 3 on three.
    assert bound.least_busiest({long[:1]: 1}, 3) == pytest.approx(6)
    assert bound.least_busiest({long: 1}, 3) == pytest.approx(3)
    # With 6 short ones: on two owners all have 14 seconds of work, on three ranks; on three 15.
    assert bound.least_busiest({long: 1, short: 6}, 3) == pytest.approx(14 / 3)
    # With 30, on one owner it makes the least work.
    assert bound.least_busiest({long: 1, short: 30}, 3) == pytest.approx(36 / 3)
    layout = RowLayout(64, 32, ((0, 32), (32, 64)))
    matrix = whole_matrix("a.weight", layout, [[(0,), (1,)]])
    copied = dataclasses.replace(matrix, has_copies=True)
    cost, wire = CostModel(), Wire.of("bf16", is_bf16=True)
    seconds = [matrix_seconds(matrix, cost, parts) for parts in (1, 2)]
    for each, expected in ((matrix, seconds), (copied, seconds[:1])):
        assignment = Assignment(((0,),), dict.fromkeys((0, 1), 0.0), 1.0)
        plan = ExchangePlan.build([each], assignment, cost, wire, staging_bytes=2**31)
        assert bound.choices_of([plan], 8) == {tuple(expected): 1}


@pytest.mark.ranks
def test_step_cost_stays_within_its_bounds(tmp_path, monkeypatch, capsys):
    """Operations, bytes, collectives and host reads of a step are counts: no machine changes them.

    They are those of docs/performance.md, or better.
    """
    benchmark = _benchmark("step_cost", monkeypatch)

    def count_on(ranks: int) -> Any:
        """Count on forked ranks in place of torchrun's."""
        path = tmp_path / f"{ranks}.json"
        launch(ranks, ["--json", str(path)], script=ROOT / "benchmarks" / "step_cost.py").check()
        (counted,) = json.loads(path.read_text())
        return counted

    monkeypatch.setattr(benchmark, "count_on", count_on)
    path = tmp_path / "all.json"
    monkeypatch.setattr(sys, "argv", ["step_cost.py", "--by-operation", "--json", str(path)])
    assert benchmark.main() == 0
    printed = capsys.readouterr().out
    assert "| 2 | Muon | c10d::alltoall_base_ |" in printed
    document = (ROOT / "docs" / "performance.md").read_text()
    for counted in json.loads(path.read_text()):
        assert counted["matrices"] == 32
        bounds, found = STEP_COST[counted["ranks"]], benchmark.of_step(counted)
        # As they are printed: a decimal place or none.
        over = {
            name: found[name]
            for name, most in bounds.items()
            if round(found[name], 1 if isinstance(most, float) else 0) > most
        }
        assert not over, f"{counted['ranks']} ranks: expected at most {bounds}, got {over}"
        row = benchmark.row_of(bounds)
        assert f"| {counted['ranks']} | {row} |" in document, f"performance.md: expected {row}"


def test_counted_operations_are_those_of_a_gpu(monkeypatch):
    """A fused list counts once, a view not at all; every way to read a value is seen."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import torch
    from operation_counts import OperationCounter

    a, b = torch.ones(4, 8), torch.ones(4, 8)

    def work() -> None:
        """Do what is counted."""
        torch._foreach_mul_([a, b], 2.0)  # each of 128 bytes, read and written
        a.view(8, 4)[2:].t().copy_(torch.empty(4, 6))  # 96 read, 96 written
        torch.mul(a, b, out=torch.empty(4, 8))  # two read, one written
        a.add_(a)  # two read, one written
        torch.empty(0).add_(1)
        a @ b.t()

    def read() -> None:
        """Read in every way."""
        total = a.sum()
        float(total), total.item(), bool(total > 0)
        torch.tensor([[total], [total]]), total.tolist(), total.cpu(), total.to("cpu")

    counter = OperationCounter()
    with counter.counting():
        counter.within("work", work)()
        counter.within("read", read)()
    work_counts, read_counts = counter.parts["work"], counter.parts["read"]
    assert work_counts.num_bytes == {
        "aten::_foreach_mul_": 512, "aten::copy_": 192, "aten::mul": 384, "aten::add_": 384,
    }  # fmt: skip
    assert set(work_counts.operations.values()) == {1} and work_counts.matrix_products == 1
    assert work_counts.host_reads.total() == work_counts.unseen_reads.total() == 0
    assert read_counts.host_reads.total() == 3
    assert +read_counts.unseen_reads == {
        "torch.tensor": 2, "Tensor.tolist": 1, "Tensor.cpu": 1, "Tensor.to": 1,
    }  # fmt: skip


def test_newton_schulz_times_each_backend_beside_its_operations(tmp_path, monkeypatch, capsys):
    """Ratios to the standard steps of the same run; what this machine cannot run is left out."""
    benchmark = _benchmark("newton_schulz", monkeypatch)
    path = tmp_path / "times.json"
    flags = ["--shapes", "16x32", "32x16", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["newton_schulz.py", *flags])
    assert benchmark.main() == 0
    for row in json.loads(path.read_text()):
        assert row["over_standard"].keys() >= {"standard", "gram"}
        assert row["over_standard"]["standard"] == 1 and min(row["over_standard"].values()) > 0
        # a = 2: 8 a + 28 of 20 a + 10.
        assert row["operations_over_standard"]["gram"] == pytest.approx(44 / 50)
    assert "| 16 x 32 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["newton_schulz.py", "--memory", "--shapes", "256x256"])
    assert benchmark.main() == 0
    found = dict(text.split() for text in capsys.readouterr().out.partition(": ")[2].split(", "))
    # X and Q X, and of n x n matrices R, P, Q, R P and the next R.
    assert 6 < float(found["gram"]) < 7.5
    assert 3 < float(found["standard"]) < 5


def test_newton_schulz_error_ranks_the_forms(monkeypatch, capsys):
    """The Gram form in fp16 beats bf16 on every matrix, and needs its restart on hard ones."""
    benchmark = _benchmark("newton_schulz_error", monkeypatch)
    monkeypatch.setattr(benchmark, "SHAPE", (64, 256))
    monkeypatch.setattr(sys, "argv", ["newton_schulz_error.py"])
    assert benchmark.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = lines[0].strip("| ").split(" | ")[1:]
    for line in lines[2:]:
        matrix, *cells = line.strip("| ").split(" | ")
        error = {n: float(c.partition(";")[0]) for n, c in zip(names, cells, strict=True)}
        assert error["gram, fp32"] < 1e-3
        assert error["gram, fp16"] < error["standard, bf16"]
        if matrix.startswith("falling"):
            assert error["standard, bf16"] < error["gram, fp16, no restart"]


def test_backends_train_compares_the_gram_form_with_two_seeds(tmp_path, monkeypatch, capsys):
    """Three runs that differ in seed and form alone; the first one leaves a checkpoint."""
    benchmark = _benchmark("backends_train", monkeypatch)
    configs = []

    def train(config, log_file, progress_interval):
        configs.append(config)
        log = TrainingLog(iteration=2, is_complete=True)
        log.losses, log.validation_losses = {1: 3.0, 2: 2.0}, {2: 2.5}
        log.step_ms = log.optimizer_ms = {1: 1.0, 2: 1.0}
        return log

    monkeypatch.setattr(benchmark, "train", train)
    flags = ["--output", str(tmp_path), "--iterations", "2", "--max-megabytes", "0.1"]
    monkeypatch.setattr(sys, "argv", ["backends_train.py", *flags])
    assert benchmark.main() == 0
    assert [config.seed for config in configs] == [1234, 1235, 1234]
    commands = [set(config.megatron_arguments()) for config in configs]
    assert commands[2] - commands[1] == {"gram", "--muon-fsdp-newton-schulz", "1234"}
    assert commands[0] - commands[1] >= {"--save", str(tmp_path / "checkpoint")}
    assert "| standard, seed 1234 | standard, seed 1235 | gram, seed 1234 |" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_step_estimate_holds_predictions_against_ranks():
    """Two ranks, one step of two variants; how near the figures are is for people to judge."""
    run = ended(STEP_ESTIMATE)
    assert run.returncode == 0, run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith("| 2 |")]
    assert [row.split(" | ")[1] for row in rows] == ["one schedule", "one bucket under way"]
    assert "of pairs of variants that differ" in run.stdout


def test_planning_measures_each_number_of_ranks():
    """Counts are those of the plan; a rank keeps less than the plan of its domains."""
    run = ended(PLANNING)
    assert run.returncode == 0, run.stderr
    rows = [line.split(" | ") for line in run.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 16", "| 64"]
    # Of 48 layers: two matrices of each of 16 experts, and three dense ones.
    assert [row[1] for row in rows] == [f"{48 * (2 * 16 + 3):,}"] * 2
    for row in rows:
        assert float(row[6]) < float(row[5]) < float(row[4])


def test_step_estimate_counts_pairs_in_order(monkeypatch):
    """Pairs that take nearly as long are left out, and those of other numbers of ranks."""
    benchmark = _benchmark("step_estimate", monkeypatch)
    rows = [
        {"ranks": ranks, "predicted_ms": predicted, "measured_ms": measured}
        for ranks, predicted, measured in [
            (2, 1, 10),
            (2, 2, 20),
            (2, 3, 20.1),
            (2, 9, 15),
            (4, 9, 1),
        ]
    ]
    # 10 < 15 < 20 and 20.1; predicted is 15 behind both.
    assert benchmark.agreement(rows) == 3 / 5


@pytest.mark.ranks
def test_fsdp2_step_counts_bytes_and_says_who_fails():
    """What travels is the plan's, on even shapes that of an all-to-all; who fails has a row."""
    run = ended(FSDP2_STEP)
    assert run.returncode == 0, run.stderr
    layouts = json.loads((run.folder / "step.json").read_text())["layouts"]
    assert list(layouts) == ["even", "experts"]
    for layout, rows in layouts.items():
        ours, fp32, adamw = (
            rows[name] for name in ("megatron_muon", "megatron_muon, wire fp32", "AdamW")
        )
        assert adamw["bytes_a_rank"] == adamw["calls"] == 0
        assert ours["plan_bytes"] < fp32["plan_bytes"]
        for row in (ours, fp32):
            sent = row["bytes_by_collective"]
            assert sum(sent.values()) - sent["allreduce"] == row["plan_bytes"] > 0
            assert row["step_ms"] > 0 and row["update_error"] < 0.05
            assert row["over_adamw"] == pytest.approx(row["step_ms"] / adamw["step_ms"])
            assert row["over_ours"] == pytest.approx(row["step_ms"] / ours["step_ms"])
        for name in ("muon-fsdp2", "dtensor-muon", "muonium"):
            assert rows[name] == {"error": "not installed"}
        if layout == "experts":
            assert rows["torch.optim.Muon"]["error"].startswith("ValueError: Muon only supports 2D")
        else:
            # It gathers every matrix on every rank.
            assert rows["torch.optim.Muon"]["bytes_a_rank"] > fp32["bytes_a_rank"]
            assert rows["torch.optim.Muon"]["update_error"] < 0.05
    # Half of 12 x 16 x 16 elements: 2 or 4 bytes there, 2 bytes back.
    for name, width in (("megatron_muon", 4), ("megatron_muon, wire fp32", 6)):
        even = layouts["even"][name]
        assert even["plan_bytes"] == even["even_all_to_all_bytes"] == 6 * 16 * 16 * width
    assert "| experts | torch.optim.Muon | ValueError: Muon only supports 2D" in run.stdout
