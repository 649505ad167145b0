# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands and figures of the documents: nothing is written that nothing checks.

A command is accounted for in one of three ways:

============  ==================================================================================
``RUN``       this file runs it; what the block shows below it must be among what it prints
``COVERED``   a test runs it, or its parts; the table names the test
GPU only      the line ``# GPU only`` stands above it in its block
============  ==================================================================================
"""

import contextlib
import fnmatch
import importlib
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import repairs
from helpers.commands import run_plan
from helpers.documents import DOCUMENTS, GPU_ONLY, Command, commands_of
from helpers.ranks import ROOT

UNIT = "tests/unit_tests"
# A shell pattern of the whole command, and the test that runs it: file::test below UNIT.
COVERED = {
    # With few iterations.
    "bash scripts/quickstart.sh*": "repository/test_quickstart.py"
    "::test_quickstart_trains_with_both_optimizers_and_reports",
    ".venv/bin/python scripts/loss_plot.py *": "repository/test_quickstart.py"
    "::test_picture_has_a_curve_and_validation_losses_of_each_run",
    # Whoever runs the tests runs one of these two.
    "bash scripts/test.sh*": "repository/test_environment.py::test_shell_script_parses",
    "bash .ci/run": "repository/test_environment.py::test_shell_script_parses",
    "bash tests/functional/run.sh*": "repository/test_functional.py"
    "::test_runner_judges_a_case_and_leaves_its_inputs_alone",
    ".venv/bin/python tests/functional/run_forked.py": "repository/test_functional.py"
    "::test_cpu_case_passes_every_rule",
    ".venv/bin/torchrun --nproc-per-node 2 scripts/train_megatron_core.py": "repository/"
    "test_train_megatron_core.py::test_script_on_megatron_core_alone_learns",
    ".venv/bin/torchrun --nproc-per-node 2 scripts/train_fsdp2.py *": "fsdp2/test_script.py"
    "::test_script_learns_and_goes_on_on_other_ranks",
    ".venv/bin/python scripts/check_compat.py*": "repository/test_check_compat.py"
    "::test_check_here_trains",
    ".venv/bin/python scripts/check_recipes.py": "repository/test_recipes.py"
    "::test_check_runs_the_recipe_that_needs_only_torch",
    ".venv/bin/torchrun --nproc-per-node 2 scripts/recipes/with_xtuner_groups.py": "repository/"
    "test_recipes.py::test_check_runs_the_recipe_that_needs_only_torch",
    "torchrun --nproc-per-node 8 -m megatron_muon pretrain_gpt.py *": "test_launcher.py"
    "::test_command_of_the_flags_page_trains_without_a_checkout",
    ".venv/bin/torchrun --nproc-per-node 2 scripts/cpu_ranks scripts/pretrain_gpt.py *": "test_"
    "launcher.py::test_command_of_the_flags_page_trains_without_a_checkout",
    "torchrun --nproc-per-node ? scripts/cpu_ranks benchmarks/optimizer_step.py *": "repository/"
    "test_benchmarks.py::test_optimizer_step_measures_every_peer_and_writes_json",
    ".venv/bin/python benchmarks/checkpoint.py *": "repository/test_benchmarks.py"
    "::test_checkpoint_measures_muon_beside_adam",
    ".venv/bin/python benchmarks/newton_schulz.py*": "repository/test_benchmarks.py"
    "::test_newton_schulz_times_each_backend_beside_its_operations",
    ".venv/bin/python benchmarks/fsdp2_step.py *": "repository/test_benchmarks.py"
    "::test_fsdp2_step_counts_bytes_and_says_who_fails",
    ".venv/bin/python benchmarks/step_cost.py*": "repository/test_benchmarks.py"
    "::test_step_cost_stays_within_its_bounds",
    ".venv/bin/python benchmarks/host_time.py*": "repository/test_benchmarks.py"
    "::test_host_time_counts_few_launches",
    # With 256 ranks.
    ".venv/bin/python -m megatron_muon.plan --preset qwen3-235b-a22b --dp 2048 *": "report/"
    "test_command.py::test_plan_of_many_ranks_imports_no_torch",
    ".venv/bin/python -m megatron_muon.checkpoint convert * --to fsdp_dtensor": "checkpoint/"
    "test_conversion.py::test_run_of_ddp_goes_on_under_megatron_fsdp",
    ".venv/bin/python -m megatron_muon.checkpoint convert * --to torch_dist": "checkpoint/"
    "test_conversion.py::test_run_goes_on_under_ddp_after_the_way_there_and_back",
    ".venv/bin/python -m megatron_muon.checkpoint verify *": "checkpoint/test_reading.py"
    "::test_commands_need_neither_megatron_nor_a_process_group",
}


COMMANDS = [command for path in DOCUMENTS for command in commands_of(path)]


def _call(main: Callable[..., Any], *arguments: Any) -> str:
    """Call the main function of a command, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(*arguments) in (0, None)
    return printed.getvalue()


def _module(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script."""
    monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module(name)


class _Log:
    """A training run that went well, of which no figure is looked at."""

    losses = dict.fromkeys(range(1, 1000), 2.5)

    def median_step_ms(self) -> float:
        """Return any time."""
        return 1.0

    median_optimizer_ms = median_inner_step_ms = median_step_ms


def _plan(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the plan report."""
    return run_plan(*arguments)


def _training(folder: str, name: str) -> Callable[[Sequence[str], pytest.MonkeyPatch], str]:
    """Return how to run a script whose trainings are replaced: test_parity.py has real ones."""

    def run(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> str:
        """Run it, and check that it asks for trainings on gloo ranks or GPUs by known scripts."""
        module = _module(folder, name, monkeypatch)
        asked: list[tuple[int, Sequence[str]]] = []

        def train(ranks: int, flags: Sequence[str]) -> _Log:
            """Note what was asked for."""
            asked.append((ranks, flags))
            return _Log()

        monkeypatch.setattr(module, "train", train)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        printed = _call(module.main)
        assert asked and all("--optimizer" in flags for _, flags in asked)
        return printed

    return run


def _repairs(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the table of repairs without its trainings; test_gradient_repairs.py has those."""
    module = _module("scripts", "measure_repairs", monkeypatch)
    monkeypatch.setattr(repairs, "_grad_norms", lambda *args: [1.0])
    return _call(module.main)


# How to run a command: a prefix, and a function of its further arguments.
RUN: dict[str, Callable[[Sequence[str], pytest.MonkeyPatch], str]] = {
    ".venv/bin/python -m megatron_muon.plan": _plan,
    ".venv/bin/python benchmarks/training_step.py": _training("benchmarks", "training_step"),
    ".venv/bin/python scripts/check_parity.py": _training("scripts", "check_parity"),
    ".venv/bin/python scripts/measure_repairs.py": _repairs,
}


def _covered(command: Command) -> str | None:
    """Return the pattern of COVERED that accounts for a command."""
    return next((row for row in COVERED if fnmatch.fnmatch(command.text, row)), None)


def _runner(command: Command) -> str | None:
    """Return the prefix of RUN by which a command is run."""
    if command.is_gpu_only or _covered(command):
        return None
    return next((p for p in RUN if f"{command.text} ".startswith(f"{p} ")), None)


def test_commands_are_accounted_for():
    """Each is run here, run by the test that COVERED names, or marked for GPUs."""
    missing = [
        f"{command.where}: {command.text}"
        for command in COMMANDS
        if not (command.is_gpu_only or _covered(command) or _runner(command))
    ]
    assert not missing, (
        f"expected commands that are tested, got {missing}. Add them to RUN or COVERED in "
        f"tests/unit_tests/repository/test_docs.py, or put {GPU_ONLY!r} above them."
    )


def test_covered_commands_and_their_tests_exist():
    """A row goes with the last document that has its command, or with its test."""
    unused = COVERED.keys() - {_covered(command) for command in COMMANDS}
    assert not unused, f"no document has {unused}"
    for file, _, name in (row.partition("::") for row in COVERED.values()):
        assert f"\ndef {name}(" in (ROOT / UNIT / file).read_text(), f"no test {file}::{name}"


RUNNABLE = {command.text: command for command in COMMANDS if _runner(command)}


@pytest.mark.parametrize("text", RUNNABLE)
def test_command_runs_and_prints_what_is_shown(text, monkeypatch):
    """Lines below a command are lines of its output."""
    prefix = _runner(RUNNABLE[text])
    printed = RUN[prefix](shlex.split(text)[len(prefix.split()) :], monkeypatch).splitlines()
    lines = {line.strip() for line in printed}
    for command in COMMANDS:
        if command.text == text:
            missing = [line for line in command.shown if line != "..." and line not in lines]
            assert not missing, f"{command.where}: no longer printed: {missing}. Got {printed[:8]}"


PLAN_ROW = re.compile(r"\| `(--preset .*?)` \| (.*) \|")
# Those of the smallest model are always tested.
PLAN_ROWS = [
    pytest.param(*row, marks=[] if "llama3-8b" in row[0] else pytest.mark.slow)
    for row in PLAN_ROW.findall((ROOT / "docs" / "performance.md").read_text())
]


@pytest.mark.parametrize(("flags", "figures"), PLAN_ROWS, ids=lambda value: value)
def test_plans_of_performance_are_those_of_today(flags, figures):
    """Each row of the table of plans but the one of 2,048 ranks, figure by figure."""
    if "--dp 2048" in flags:
        pytest.skip("needs half a minute")
    report: dict[str, Any] = json.loads(run_plan(*shlex.split(flags), "--json"))
    assert figures.split(" | ") == [
        f"{len(report['matrices']):,}",
        f"{report['busiest_over_ideal']:.2f}",
        f"{report['moved_fraction']:.1%}",
        f"{report['bytes_sent'] / len(report['ranks']) / 1e6:,.0f}",
        f"{report['busiest_ns'] / 1e6:.1f}",
        f"{report['min_step_ns'] / 1e6:.1f}",
        f"{report['max_staging_bytes'] / 1e9:.1f}",
    ]
