# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Functional recipes: the CPU cases themselves, the flags of the GPU cases, and the runner."""

import functools
import json
import sys
from pathlib import Path

import pytest
import run
import soak
from cases import command_line, load_cases
from helpers.commands import run_command
from helpers.ranks import ROOT, run_ranks
from metrics import read_golden
from rules import compare_with_golden, compare_with_unsharded
from run_forked import BROKEN

CASES = load_cases()
GPU_CASES = [case for case in CASES if case.platform == "dgx_h100"]
CPU_CASES = [case for case in CASES if case.platform == "cpu"]


def _parse_on_eight_gpus(jobs: list[tuple[list[str], dict[str, str]]]) -> list[list[str]]:
    import os

    import torch

    import megatron_muon

    megatron_muon.enable()
    from megatron.training import arguments as megatron_arguments

    parsed = []
    for arguments, environment in jobs:
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        sys.argv = ["pretrain_gpt.py", *arguments]
        args = megatron_arguments.parse_args()
        megatron_arguments.validate_args(args)
        assert torch.are_deterministic_algorithms_enabled()
        parsed.append([args.optimizer, str(args.use_megatron_fsdp)])
    return parsed


@pytest.mark.ranks
def test_flags_of_gpu_cases_are_accepted_by_megatron():
    """Megatron's parser accepts the flags of the GPU cases."""
    variables = dict.fromkeys(
        ["DATA_PATH", "DATA_CACHE_PATH", "TENSORBOARD_PATH"]
        + ["CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH"],
        "/nowhere",
    )
    assert {case.num_ranks for case in GPU_CASES} == {8}
    jobs = [(command_line(case.arguments, variables), dict(case.environment)) for case in GPU_CASES]
    env = {"WORLD_SIZE": "8"}
    (parsed,) = run_ranks(1, _parse_on_eight_gpus, jobs, env=env).check().results
    assert parsed == [["muon", "True"]] * len(GPU_CASES)


@functools.cache
def forked_verdicts() -> dict[str, list]:
    """Run every CPU case once on forked ranks."""
    script = ROOT / "tests" / "functional" / "run_forked.py"
    done = run_command(sys.executable, str(script))
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
@pytest.mark.slow
def test_cpu_case_passes_every_rule(case):
    """Each CPU case passes the rules for golden values, resumption and unsharded runs."""
    verdicts = forked_verdicts()[case.name]
    assert all(passed for _, _, passed, _ in verdicts), verdicts
    rules = {rule.partition(",")[0] for rule, *_ in verdicts}
    expected = {"golden", "unsharded"} | ({"resume"} if case.test_type == "ckpt-resume" else set())
    assert rules == expected
    golden = read_golden(case.golden_path)["lm loss"]
    assert golden[case.train_iters] < golden[1] - 0.5


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.slow
def test_broken_optimizer_fails_the_unsharded_rule(broken):
    """A broken optimizer fails the unsharded rule, where Megatron's 5 % pass most."""
    passed = {(rule, metric): passed for rule, metric, passed, _ in forked_verdicts()[broken]}
    assert not passed["unsharded", "lm loss"]
    assert passed["golden, approximate", "lm loss"] == (broken != "do_nothing")


@pytest.mark.parametrize("recorded_on", ["this kind", "that kind", None])
def test_last_digit_counts_on_the_kind_of_cpu_that_recorded_it(recorded_on):
    """The last digit of a loss counts only on the kind of CPU that recorded it."""
    losses, golden = {8: 3.535445213317871}, {8: 3.53544}
    kinds = {"recorded_on": recorded_on, "here": "this kind"}
    exact, approximate = compare_with_golden("lm loss", losses, golden, exactly=True, **kinds)
    assert exact.passed == (recorded_on == "that kind")
    assert approximate.passed


def test_resumed_run_that_loads_nothing_fails(tmp_path):
    """A resumed run that loads nothing fails, though it repeats the run from its seed."""
    from torch.utils.tensorboard import SummaryWriter

    case = next(case for case in CPU_CASES if case.test_type == "ckpt-resume")

    def train(ranks, arguments, **options):
        flags = dict(zip(arguments, arguments[1:], strict=False))
        (Path(flags.get("--save", tmp_path)) / "iter_0000012").mkdir(parents=True, exist_ok=True)
        with SummaryWriter(flags["--tensorboard-dir"]) as writer:
            for step in range(1, 13):
                writer.add_scalar("lm loss", 5.0 - step / 10, step)
                writer.add_scalar("num-zeros", 0.0, step)

    verdicts = run.Runner(tmp_path, Path("unused.py"), exactly=False, train=train).run(case)
    (resume,) = [verdict for verdict in verdicts if verdict.rule == "resume"]
    assert not resume.passed and "nothing was loaded" in resume.detail


def test_unsharded_rule_fails_for_nan_and_for_missing_steps():
    """The unsharded rule fails for NaN and for missing steps."""
    losses = {step: 10.8 - step / 100 for step in range(1, 21)}
    assert compare_with_unsharded(losses, losses, 20, 5e-7).passed
    short = {step: loss for step, loss in losses.items() if step < 20}
    for wrong in (losses | {7: float("nan")}, losses | {7: 9.9}, short):
        assert not compare_with_unsharded(wrong, losses, 20, 5e-7).passed


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("flags", "num_rows"), [([], 4 + 8), (["--fsdp2"], 4 + 4)])
def test_killed_and_stopped_ranks_resume_to_the_bit(flags, num_rows):
    """A kill or a stop of a rank in any kind of save, or in a step, loses nothing finished."""
    script = str(ROOT / "tests" / "functional" / "kill_saves.py")
    done = run_command(sys.executable, script, "--kills", "4", "--stop-seconds", "1", *flags)
    rows = [line for line in done.stdout.splitlines() if "killed" in line or "stopped" in line]
    assert (done.returncode, len(rows)) == (0, num_rows), done.stdout + done.stderr[-4000:]
    assert all(row.endswith("| equal |") for row in rows)


@pytest.mark.slow
@pytest.mark.ranks
def test_soak_stays_beside_ddp_after_a_restart_on_other_ranks(tmp_path):
    """A restart on other ranks neither changes losses beyond DDP's noise, nor leaks a file."""
    script, curves = str(ROOT / "tests" / "functional" / "soak.py"), tmp_path / "soak.json"
    flags = ("--iterations", "24", "--ranks", "2", "3", "--output", str(curves))
    done = run_command(sys.executable, script, *flags)
    rows = [line for line in done.stdout.splitlines() if line.endswith(("| noise |", "| flat |"))]
    assert (done.returncode, len(rows)) == (0, 12), done.stdout + done.stderr[-4000:]
    plot, picture = ROOT / "scripts" / "maintainer" / "metrics_plot.py", tmp_path / "soak.svg"
    assert run_command(sys.executable, str(plot), str(curves), str(picture)).returncode == 0
    assert picture.read_text().count("<polyline") == 8


@pytest.mark.slow
@pytest.mark.ranks
def test_save_costs_has_a_row_per_optimizer_and_kind_of_save():
    """A save that never completes leaves its row out."""
    script = str(ROOT / "tests" / "functional" / "save_costs.py")
    done = run_command(sys.executable, script, "--hidden", "64", "--layers", "1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("synchronous | ") == 4


@pytest.mark.parametrize("key", [*soak.EQUAL, "objects", "memory"])
def test_soak_names_what_grows(key):
    """A file that is never closed, or a matrix in each iteration, fails the soak."""
    step = {"objects": 50, "memory": 100 * 10_000}.get(key, 1)
    held = [
        {"iteration": i, **dict.fromkeys((*soak.EQUAL, "objects", "memory"), 7)}
        for i in (100, 200, 300, 400, 500)
    ]
    assert soak.growing(held) == []
    # An allocator takes memory once.
    held[-1]["memory"] += 5_000_000
    assert soak.growing(held) == []
    for number, record in enumerate(held):
        record[key] += number * step
    assert soak.growing(held) == [key]


@pytest.mark.parametrize(("error", "passes"), [(1e-3, True), (5e-3, False)])
def test_soak_compares_losses_with_the_noise_of_ddp(error, passes):
    """Losses that drift from DDP's by more than DDP's own noise fail the soak."""
    iterations = range(1, 101)

    def curves(change):
        losses = {i: 3.0 + change * (-1) ** i for i in iterations}
        return soak.Curves(losses, {i: losses[i] for i in (50, 100)})

    unsharded = [curves(change) for change in (0.0, 2e-3, -2e-3)]
    assert soak.judge_losses(curves(3.0 * error), unsharded, 100) == passes
