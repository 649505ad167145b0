# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and what they count is right; how fast anything is, they say, not a test."""

import json
import re
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from counting import OperationCounter
from helpers.commands import train_forked
from helpers.ranks import ROOT, launch, run_ranks

from megatron_muon.plan.layout import Splits
from megatron_muon.tools.plan.model_shape import PRESETS, ModelShape

# What a step may cost at most, by ranks: figures of step_cost.py, which docs/performance.md shows.
# Whoever removes an operation lowers them, here and there; nothing may raise them unseen.
STEP_COST = {1: "1.8 | 1.4 | 2 | 81 | 1", 2: "1.6 | 0.9 | 5 | 79 | 1"}


@pytest.mark.ranks
def test_optimizer_step_measures_every_peer_and_writes_json(tmp_path):
    """The benchmark of a step measures every peer and writes their bytes and times."""
    path = tmp_path / "step.json"
    flags = ["--hidden", "32", "--layers", "2", "--rounds", "2", "--json", str(path)]
    run = launch(2, flags, script=ROOT / "benchmarks" / "optimizer_step.py").check()
    data = json.loads(path.read_text())
    peers = data["peers"]
    assert set(peers) == {"adam", "owner", "owner, fp32 messages", "all_gather", "layer_wise"}
    assert peers["adam"]["bytes_a_rank"] == 0
    assert peers["owner"]["bytes_a_rank"] < peers["owner, fp32 messages"]["bytes_a_rank"]
    assert peers["owner, fp32 messages"]["bytes_a_rank"] < peers["all_gather"]["bytes_a_rank"]
    for name, peer in peers.items():
        assert peer["step_ms"] > 0
        assert peer["over_owner"] == pytest.approx(peer["step_ms"] / peers["owner"]["step_ms"])
        assert (0 < peer["efficiency"] < 1) == (name != "adam")
    assert "| owner |" in run.outputs[0]


@pytest.fixture
def load(monkeypatch) -> Callable[..., ModuleType]:
    """Function that imports a benchmark, and with flags runs it in this process."""

    def load_benchmark(name: str, *flags: str, **names: Any) -> ModuleType:
        # Under another name: modules of the package have the same ones.
        spec = spec_from_file_location(f"{name}_benchmark", ROOT / "benchmarks" / f"{name}.py")
        benchmark = module_from_spec(spec)
        spec.loader.exec_module(benchmark)
        for replaced, value in names.items():
            monkeypatch.setattr(benchmark, replaced, value)
        if flags:
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
            assert benchmark.main() == 0
        return benchmark

    return load_benchmark


@pytest.mark.slow
@pytest.mark.ranks
def test_saves_measure_muon_beside_adam(tmp_path, load, capsys):
    """A checkpoint of Muon is smaller than one of Adam, by a state."""
    path = tmp_path / "saves.json"
    flags = ["--saves", "--hidden", "64", "--layers", "1", "--passes", "1", "--json", str(path)]
    load("training_step", *flags, "--runs", "FSDP, adam", "FSDP, muon, owner", train=train_forked)
    adam, muon = json.loads(path.read_text()).values()
    assert muon["MB"] < adam["MB"]
    assert 0.5 < muon["state_MB"] / adam["state_MB"] < 0.9
    assert min(*adam.values(), *muon.values()) > 0
    assert "| FSDP, muon, owner |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "bounds"), STEP_COST.items())
def test_step_cost_stays_within_its_bounds(ranks, bounds):
    """Operations, bytes, collectives and host reads of a step stay within documented counts."""
    run = launch(ranks, [], script=ROOT / "benchmarks" / "step_cost.py").check()
    assert f"| {ranks} | {bounds} |" in (ROOT / "docs" / "performance.md").read_text()
    (row,) = re.findall(rf"^\| {ranks} \| (.*) \|$", run.outputs[0], re.MULTILINE)
    found = zip(map(float, row.split(" | ")), map(float, bounds.split(" | ")), strict=True)
    assert all(figure <= most for figure, most in found), row


def _engine_of_experts() -> dict[str, float]:
    import cpu_ranks

    cpu_ranks.enable()
    import host_time

    host_time.go_the_way_of_a_gpu()
    return host_time.engine_figures(host_time.JOBS["qwen3-30b-64"])


@pytest.mark.slow
@pytest.mark.ranks
def test_host_time_counts_few_launches(tmp_path):
    """A step launches few kernels beside products and collectives."""
    path = tmp_path / "times.json"
    flags = ["--jobs", "llama3-8b-64", "--json", str(path)]
    run = launch(1, flags, script=ROOT / "benchmarks" / "host_time.py").check()
    (dense,) = json.loads(path.read_text()).values()
    (experts,) = run_ranks(1, _engine_of_experts).check().results
    # A step of nothing would launch nothing.
    assert dense["stacks"] < dense["own_launches"] + dense["engine_launches"] <= 40
    assert experts["stacks"] < experts["engine_launches"] <= 66
    assert "| llama3-8b-64 |" in run.outputs[0]
    assert min(value for name, value in dense.items() if name.endswith("_us")) > 0


@pytest.mark.slow
def test_plan_time_plans_the_matrices_of_a_rank(tmp_path):
    """A rank of a large job plans its experts and the dense matrices."""
    path = tmp_path / "times.json"
    flags = ["--jobs", "deepseek-v3-64", "--repeats", "1", "--json", str(path)]
    run = launch(1, flags, script=ROOT / "benchmarks" / "plan_time.py").check()
    (job,) = json.loads(path.read_text()).values()
    model = PRESETS["deepseek-v3"]
    stages = model.stage(1, 64, Splits())
    shapes = [parameter.shape for layers in stages for layer in layers for parameter in layer]
    assert job["matrices"] == sum(len(shape) == 2 for shape in shapes)
    assert job["all_s"] == pytest.approx(job["boxes_s"] + job["layouts_s"] + job["plan_s"])
    assert min(job.values()) > 0
    assert "| deepseek-v3-64 |" in run.outputs[0]


def test_counted_operations_are_those_of_a_gpu():
    """The counter counts a list once, no view, and every read of a value."""
    a, b = torch.ones(4, 8), torch.ones(4, 8)
    with OperationCounter() as work:
        torch._foreach_mul_([a, b], 2.0)  # each of 128 bytes, read and written
        a.view(8, 4)[2:].t().copy_(torch.empty(4, 6))  # 96 read, 96 written
        torch.mul(a, b, out=torch.empty(4, 8))  # two read, one written
        a.add_(a)  # two read, one written
        torch.empty(0).add_(1)
        a @ b.t()
    with OperationCounter() as read:
        total = a.sum()
        float(total), total.item(), bool(total > 0)
        torch.tensor([[total], [total]]), total.tolist(), total.cpu(), total.to("cpu")
        torch.tensor([1, 2], device=total.device)
    assert work.num_bytes == {
        "aten::_foreach_mul_": 512, "aten::copy_": 192, "aten::mul": 384, "aten::add_": 384,
    }  # fmt: skip
    assert set(work.operations.values()) == {1} and work.matrix_products.total() == 1
    assert work.host_reads.total() == 0
    assert +read.host_reads == {
        "aten::_local_scalar_dense": 3,
        "torch.tensor": 3, "Tensor.tolist": 1, "Tensor.cpu": 1, "Tensor.to": 1,
    }  # fmt: skip


def test_newton_schulz_times_each_backend_beside_its_operations(tmp_path, load, capsys):
    """The benchmark of Newton-Schulz has ratios of times and operations by backend."""
    path = tmp_path / "times.json"
    load("newton_schulz", "--shapes", "16x32", "32x16", "--rounds", "2", "--json", str(path))
    for row in json.loads(path.read_text()):
        assert row["over_standard"].keys() >= {"standard", "gram"}
        assert row["over_standard"]["standard"] == 1 and min(row["over_standard"].values()) > 0
        # a = 2: 8 a + 28 of 20 a + 10.
        assert row["operations_over_standard"]["gram"] == pytest.approx(44 / 50)
    assert "| 16 x 32 |" in capsys.readouterr().out
    load("newton_schulz", "--memory", "--shapes", "256x256")
    found = dict(text.split() for text in capsys.readouterr().out.partition(": ")[2].split(", "))
    # X and Q X, and of n x n matrices R, P, Q, R P and the next R.
    assert 6 < float(found["gram"]) < 7.5
    assert 3 < float(found["standard"]) < 6


@pytest.mark.slow
@pytest.mark.ranks
def test_fsdp2_step_counts_bytes_and_says_who_fails(tmp_path):
    """The benchmark of FSDP2 counts the bytes of the plan, and has a row for who fails."""
    path = tmp_path / "step.json"
    flags = "--hidden 16 --layers 1 --rounds 1 --layouts even experts --json".split()
    script = ROOT / "benchmarks" / "fsdp2_step.py"
    run = launch(2, [*flags, str(path)], script=script).check()
    layouts = json.loads(path.read_text())["layouts"]
    # Half of 12 x 16 x 16 elements: 2 or 4 bytes there, 2 bytes back. Experts stay.
    for name, width in (("megatron_muon", 4), ("megatron_muon, fp32 messages", 6)):
        for layout, num_bytes in (("even", 6 * 16 * 16 * width), ("experts", 0)):
            row, adamw = layouts[layout][name], layouts[layout]["AdamW"]
            sent = row["bytes_by_collective"]
            assert sum(sent.values()) - sent["allreduce"] == row["plan_bytes"] == num_bytes
            assert (row["calls"] == 1) == (num_bytes == 0)
            assert row["update_error"] < 0.05 and adamw["calls"] == 0
            assert row["over_adamw"] == pytest.approx(row["step_ms"] / adamw["step_ms"])
    for rows in layouts.values():
        assert rows["dion"] == rows["DistMuon"] == {"error": "not installed"}
    assert layouts["even"]["torch.optim.Muon"]["update_error"] < 0.05
    assert "| experts | torch.optim.Muon | ValueError: Muon only supports 2D" in run.outputs[0]


@pytest.mark.slow
@pytest.mark.ranks
def test_fsdp2_step_counts_bytes_and_states_of_soap(tmp_path):
    """The benchmark of SOAP counts the bytes of the plan, and states alone as kept memory."""
    path = tmp_path / "step.json"
    flags = "--soap --hidden 16 --layers 1 --rounds 1 --layouts even --json".split()
    run = launch(2, [*flags, str(path)], script=ROOT / "benchmarks" / "fsdp2_step.py").check()
    rows = json.loads(path.read_text())["layouts"]["even"]
    ours, sent = rows["megatron_muon"], rows["megatron_muon"]["bytes_by_collective"]
    # Half of 12 x 16 x 16 elements: weights and gradients there, 4 bytes back.
    assert sum(sent.values()) - sent["allreduce"] == ours["plan_bytes"] == 6 * 16 * 16 * 12
    squares = sum(a * a + b * b + a * b for a, b in ((1, 1), (3, 1), (4, 1), (1, 4)))
    # Beside them numbers of steps.
    assert 0 <= sum(ours["kept_bytes"]) - 8 * 16 * 16 * squares < 1000
    assert sum(rows["AdamW"]["kept_bytes"]) - 8 * 12 * 16 * 16 < 1000
    assert rows["Shampoo, ROUND_ROBIN"] == rows["Shampoo, REPLICATE"] == {"error": "not installed"}
    assert "| even | megatron_muon |" in run.outputs[0]


@pytest.mark.slow
@pytest.mark.ranks
def test_documents_have_the_states_of_registered_optimizers():
    """The documents list each registered optimizer, with the elements of its state."""
    run = launch(2, [], script=ROOT / "benchmarks" / "registered_optimizers.py").check()
    rows = re.findall(r"^\| (\w+) \| (.*) \| (.*) \|$", run.outputs[0], re.MULTILINE)
    found = {name: (state, num_bytes) for name, state, num_bytes in rows if name != "class"}
    assert found.pop("Muon") == ("m n", "4")
    text = (ROOT / "docs" / "optimizers.md").read_text()
    listed: dict[str, str] = {}
    for names, states in re.findall(r"^\| (`\w+`(?:; `\w+`)?) \|.*\| (.*) \|$", text, re.M):
        pairs = re.findall(r"\w+", names), re.sub(r" \(.*?\)", "", states).split("; ")
        listed |= {name: pairs[1][min(i, len(pairs[1]) - 1)] for i, name in enumerate(pairs[0])}
    assert {name: (listed.get(name), "12") for name in found} == found


def test_device_time_steps_the_plan_of_a_large_job(load, monkeypatch):
    """The benchmark of device time steps the plan of a large job."""
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(PRESETS, "llama3-8b", ModelShape(4, 128, 256, 4, 2))
    kernels = {"_move": 1.0, "nvjet": 2.0}
    benchmark = load("device_time", kernel_ms=lambda step: (step(), kernels)[1])
    job = benchmark.JOBS["llama3-8b-64"]._replace(dp=2)
    roof = benchmark.Roof(tflops=1.0, gbps=1.0)
    found = benchmark.measure(job, "gram", roof, torch.device("cpu"))
    assert (found["rows_ms"], found["products_ms"]) == (1.0, 2.0)
    # Five steps of the matrices that the rank owns, and 12 bytes for each element that it holds.
    expected_ms = found["standard_flops"] / 1e9 + 12 * found["elements_M"]
    assert found["bound_ms"] == pytest.approx(expected_ms) and found["standard_flops"] > 0
