# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_muon.plan``: what it prints, for whom, and what it refuses."""

import dataclasses
import json
import re
import sys
from typing import Any

import pytest
from helpers.commands import run_command

from megatron_muon.plan.__main__ import main
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.report.model_shape import PRESETS
from megatron_muon.report.simulation import Parallelism, simulate

SMALL = ("--preset", "llama3-8b", "--num-layers", "1", "--dp", "4")


def _report(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_preset_flags_and_overrides_describe_the_same_model(capsys):
    """A preset is a name for Megatron's flags, each of which can be changed."""
    flags = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    by_flags = _report(capsys, *flags.split(), "--num-query-groups", "8", "--dp", "16")
    assert by_flags == _report(capsys, "--preset", "llama3-8b", "--dp", "16")
    assert len(by_flags["matrices"]) == 128
    short = _report(capsys, "--preset", "llama3-8b", "--num-layers", "2", "--dp", "16")
    assert len(short["matrices"]) == 8
    stage = _report(capsys, "--preset", "llama3-8b", "--pp", "4", "--dp", "16")
    assert len(stage["matrices"]) == 32


@pytest.mark.parametrize(
    ("flags", "num_matrices", "world_size"),
    [
        ("--tp 2", 2 * 128, 16),
        ("--tp 2 --muon-tp-mode duplicated", 128, 16),
        ("--hsdp 2", 128, 8),
        ("--hsdp 2 --hfsdp", 128, 8),
        ("--sharding no_shard", 128, 8),
    ],
)
def test_parallelism_of_a_dense_model(flags, num_matrices, world_size, capsys):
    """Tensor ranks have matrices of their own unless their mode joins them."""
    report = _report(capsys, "--preset", "llama3-8b", "--dp", "8", *flags.split())
    assert len(report["matrices"]) == num_matrices
    assert len(report["ranks"]) == world_size
    elements = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    copies = {"--hsdp 2": 2, "--sharding no_shard": 8}.get(flags, 1)
    # Nothing can be moved more often than there and back to every copy.
    assert 0 < report["bytes_sent"] <= 2 * elements * (1 + copies)
    assert report["busiest_over_ideal"] < 1.3


def test_dense_matrices_balance_whole_experts(capsys):
    """Of 12,288 expert matrices over 8 ranks each, most lie whole on a rank and stay there.

    If all of these stay, 3 % of the elements travel, and the busiest rank has 1.18 times the ideal.
    """
    report = _report(capsys, "--preset", "qwen3-30b-a3b", "--dp", "64", "--ep", "8")
    assert len(report["matrices"]) == 48 * (128 * 2 + 3)
    assert report["moved_fraction"] < 0.11
    assert report["busiest_over_ideal"] < 1.06
    # One for each matrix would be 338 on one rank.
    assert max(rank["num_calls"] for rank in report["ranks"]) <= 40


def test_slow_links_leave_matrices_with_their_largest_holders(capsys):
    """With links a thousand times slower nothing travels that need not."""
    model = ("--preset", "llama3-8b", "--num-layers", "4")
    fast, slow = (
        _report(capsys, *model, *flags)
        for flags in ((), ("--cost-model", "gbps=0.0001,gbps_between_nodes=0.0001"))
    )
    # Of two holders of about as many rows it is the one with the quietest link.
    assert slow["bytes_sent"] <= 1.05 * slow["lower_bound_bytes"] < fast["bytes_sent"]


def test_table_is_for_people(capsys):
    """Without --json the same numbers come as a table."""
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    assert "4 matrices, 218.1 M elements, on 4 ranks" in text
    assert "Newton-Schulz: busiest rank" in text and "lower bound" in text
    assert "step: " in text and " ms at least" in text


def test_limit_that_is_kept_is_not_refused(capsys):
    """Two plans share one arena: twice the larger one was once asked for.

    deepseek-v3 on 64 ranks was refused 700 MB, of which it would have used 698.
    """
    arguments = "--preset qwen3-30b-a3b --num-layers 4 --dp 8 --ep 4 --staging-bytes".split()
    with pytest.raises(SystemExit):
        main([*arguments, "1"])
    refusal = capsys.readouterr().err
    enough = int(re.search(r"Set --muon-fsdp-staging-bytes to (\d+) or more", refusal)[1])
    needed = _report(capsys, *arguments, str(enough))["max_staging_bytes"]
    assert needed <= enough
    assert _report(capsys, *arguments, str(needed))["max_staging_bytes"] <= needed
    plans = simulate(
        dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=4),
        Parallelism(dp=8, ep=4),
        PlanSettings(staging_bytes=needed),
    )
    assert needed < 2 * max(plan.staging_bytes for plan in plans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp", "8"], "num_layers: expected a positive number, got 0. Pass --num-layers."),
        (["--preset", "llama3-8b", "--ep", "2"], "ep: expected a divisor of 0 experts, got 2"),
        (
            ["--preset", "llama3-8b", "--dp", "9", "--hsdp", "2"],
            "hsdp: expected dp to be a multiple of 2 instances, got dp 9",
        ),
        (["--preset", "llama3-8b", "--tp", "3"], "to be a multiple of 3 tensor-parallel ranks"),
        (
            ["--preset", "llama3-8b", "--cost-model", "tflops=0"],
            "expected a positive, finite tflops, got 0.0",
        ),
        (["--preset", "llama3-8b", "--max-owners", "3"], "max-owners: expected a power of two"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message, capsys):
    """The message names what was expected, what came and what to do; the exit code is 2."""
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
from megatron_muon.plan.__main__ import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.slow
def test_plan_of_many_ranks_imports_no_torch():
    """A mixture of 235 B parameters; docs/performance.md has it on 2,048 ranks."""
    flags = ("--preset", "qwen3-235b-a22b", "--dp", "256", "--ep", "8", "--json")
    done = run_command(sys.executable, "-c", WITHOUT_TORCH, *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["ranks"]) == 256 and len(report["matrices"]) == 94 * (128 * 2 + 3)
    assert report["busiest_over_ideal"] < 1.3
