# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Golden values are compared exactly on the kind of CPU that recorded them, and nowhere else."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests" / "functional")]

import run  # noqa: E402
from cases import load_cases  # noqa: E402
from metrics import MetricsError, read_golden, read_recorded_on, write_golden  # noqa: E402
from rules import compare_with_golden  # noqa: E402

CPU_CASES = [case for case in load_cases() if case.platform == "cpu"]
# Of a case with tensor parallelism: what another CPU found at step 8, and what was recorded.
FOUND, GOLDEN = {8: 3.535445213317871}, {8: 3.53544}


@pytest.mark.parametrize("recorded_on", ["this kind", None])
def test_last_digit_counts_on_the_kind_that_recorded_it(recorded_on):
    """Also where no kind is written, as in files that Megatron recorded."""
    exact, approximate = compare_with_golden(
        "lm loss", FOUND, GOLDEN, exactly=True, recorded_on=recorded_on, here="this kind"
    )
    assert exact.rule == "exact"
    assert not exact.passed
    assert "step 8: 3.535445213317871 is not 3.53544" in exact.detail
    assert approximate.passed
    same, _ = compare_with_golden(
        "lm loss", GOLDEN, GOLDEN, exactly=True, recorded_on=recorded_on, here="this kind"
    )
    assert same.passed
    assert "1 of 1 steps equal" in same.detail


def test_last_digit_does_not_count_on_another_kind_which_is_said():
    """Two cases failed on each CPU but the one that had recorded them, for one digit of 20 losses.

    The instructions were pinned, and the documents promised equality on any x86-64 CPU with AVX2.
    """
    kinds = {"recorded_on": "that kind", "here": "this kind"}
    exact, approximate = compare_with_golden("lm loss", FOUND, GOLDEN, exactly=True, **kinds)
    assert exact.passed
    assert exact.detail == "not compared: recorded on that kind, this is this kind"
    assert approximate.passed
    _, far = compare_with_golden("lm loss", {8: 3.9}, GOLDEN, exactly=True, **kinds)
    assert not far.passed


@pytest.mark.parametrize(("here", "said"), [("that kind", "3 of 3"), ("this kind", "not compared")])
def test_runner_asks_for_the_kind_of_this_cpu(tmp_path, monkeypatch, here, said):
    """The runner passes on what the file says and what this machine is; files it writes say so."""
    case = CPU_CASES[0]
    values = {step: 4.5 - step / 10 for step in (1, 2, 3)}
    path = tmp_path / "golden.json"
    write_golden(path, {name: values for name in case.metrics}, 3, "that kind")
    monkeypatch.setattr(run, "cpu_kind", lambda: here)
    monkeypatch.setattr(type(case), "golden_path", path)
    runner = run.Runner(tmp_path, Path("unused.py"), exactly=True)
    verdicts = runner._judge_golden(case, dict.fromkeys(case.metrics, values))
    details = [verdict.detail for verdict in verdicts if verdict.rule == "golden, exact"]
    assert len(details) == len(case.metrics)
    assert all(said in detail for detail in details)
    assert all(verdict.passed for verdict in verdicts)


def test_resumed_half_is_compared_exactly_on_any_cpu(tmp_path):
    """Both halves come from one machine, so that no kind leaves the comparison out."""
    case = next(case for case in CPU_CASES if case.test_type == "ckpt-resume")
    values = {step: 4.5 - step / 10 for step in range(1, case.train_iters + 1)}
    second = {step: x for step, x in values.items() if step > case.train_iters // 2}
    runner = run.Runner(tmp_path, Path("unused.py"), exactly=True)
    for change, passes in ((0.0, True), (1e-5, False)):
        found = {step: x + change for step, x in second.items()}
        first = dict.fromkeys(case.metrics, values)
        verdicts = runner._judge_resume(case, first, dict.fromkeys(case.metrics, found))
        exact = [verdict for verdict in verdicts if verdict.rule == "resume, exact"]
        assert [verdict.passed for verdict in exact] == [passes] * len(case.metrics)


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_golden_files_name_the_kind_that_recorded_them(case):
    """Vendor, family and model, as ``/proc/cpuinfo`` has them."""
    vendor, *rest = read_recorded_on(case.golden_path).split()
    assert vendor in ("GenuineIntel", "AuthenticAMD")
    assert rest[0::2] == ["family", "model"]
    assert all(number.isdigit() for number in rest[1::2])


def test_kind_is_a_key_of_each_metric_where_megatrons_reader_allows_one(tmp_path):
    """Its reader takes each key of the file for a metric, and ignores unknown keys inside one."""
    path = tmp_path / "golden.json"
    write_golden(path, {"lm loss": {1: 4.5}, "num-zeros": {1: 3.0}}, 1, "that kind")
    golden = json.loads(path.read_text())
    assert golden.keys() == {"lm loss", "num-zeros"}
    known = {"start_step", "end_step", "step_interval", "values"}
    assert all(metric.keys() - known == {"recorded_on"} for metric in golden.values())
    assert read_golden(path) == {"lm loss": {1: 4.5}, "num-zeros": {1: 3.0}}
    assert read_recorded_on(path) == "that kind"
    golden["lm loss"]["recorded_on"] = "this kind"
    path.write_text(json.dumps(golden))
    with pytest.raises(MetricsError, match="Copy the whole file"):
        read_recorded_on(path)
    write_golden(path, {"lm loss": {1: 4.5}}, 1)
    assert read_recorded_on(path) is None


def test_kind_is_something_on_every_machine(monkeypatch):
    """Where there is no ``/proc/cpuinfo``, system and architecture stand for the kind."""
    assert run.cpu_kind() == run.cpu_kind() != ""

    def refuse(*_args, **_kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert run.platform.machine() in run.cpu_kind()
