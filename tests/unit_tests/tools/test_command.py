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

from megatron_muon.plan.layout import Splits
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.tools.plan.command import main
from megatron_muon.tools.plan.model_shape import PRESETS
from megatron_muon.tools.plan.simulation import Parallelism, simulate

SMALL = ("--preset", "llama3-8b", "--num-layers", "1", "--dp", "4")


def _report(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _staging_bytes(report: dict[str, Any]) -> int:
    return max(rank["staging_bytes"] for rank in report["ranks"])


def test_preset_flags_and_overrides_describe_the_same_model(capsys):
    """A preset is a name for flags of Megatron, each of which can be changed."""
    flags = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    by_flags = _report(capsys, *flags.split(), "--num-query-groups", "8", "--dp", "16")
    assert by_flags == _report(capsys, "--preset", "llama3-8b", "--dp", "16")
    assert len(by_flags["matrices"]) == 128
    short = _report(capsys, "--preset", "llama3-8b", "--num-layers", "2", "--dp", "16")
    assert len(short["matrices"]) == 8
    stage = _report(capsys, "--preset", "llama3-8b", "--pp", "4", "--dp", "16")
    assert len(stage["matrices"]) == 32


@pytest.mark.parametrize("flags", ["", "--muon-split-glu"])
def test_soap_states_operations_and_bytes_are_those_of_the_blocks(flags, capsys):
    """The cost of SOAP is that of whole blocks, and weights, gradients and results travel."""
    assert main([*SMALL, *flags.split(), "--soap"]) == 0
    states, operations, sent = capsys.readouterr().out.splitlines()
    fc1 = [(14336, 4096)] * 2 if flags else [(28672, 4096)]
    shapes = [(4096, 4096), (6144, 4096), (4096, 14336), *fc1]
    mflop = [(10 * m * n * (m + n) + 6 * (m**3 + n**3)) / 1e6 for m, n in shapes]
    mb = [8 * (m * m + n * n + m * n) / 1e6 for m, n in shapes]
    # The owner of gate and up has no other matrix.
    for line, figures in ((states, mb), (operations, mflop)):
        most = sum(figures[-len(fc1) :])
        assert line.endswith(f" a GPU: {sum(figures) / 4:,.0f}, at most {most:,.0f}")
    report = _report(capsys, *SMALL, *flags.split(), "--muon-fsdp-max-owners", "1")
    # Owners differ, but in either plan about a quarter of a matrix stays where it is.
    mean_mb = float(re.findall(r"a GPU: ([\d,]+)", sent)[0].replace(",", ""))
    of_muon = sum(rank["bytes_sent"] for rank in report["ranks"]) / 4e6
    assert 2.9 < mean_mb / of_muon < 3.1


LLAMA, QWEN = "--preset llama3-8b", "--preset qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("flags", "num_matrices", "num_ranks", "max_busiest"),
    [
        (f"{LLAMA} --dp 8 --tp 2", 2 * 128, 16, 1.3),
        (f"{LLAMA} --dp 8 --tp 2 --muon-tp-mode duplicated", 128, 16, 1.3),
        (f"{LLAMA} --dp 8 --hsdp 2", 128, 8, 1.3),
        (f"{LLAMA} --dp 8 --hsdp 2 --hfsdp", 128, 8, 1.3),
        (f"{LLAMA} --dp 8 --sharding no_shard", 128, 8, 1.3),
        # If all whole experts stayed where they are, it would be 1.18.
        (f"{QWEN} --num-layers 16 --dp 64 --ep 8", 16 * (128 * 2 + 3), 64, 1.1),
    ],
)
def test_known_models_are_balanced(flags, num_matrices, num_ranks, max_busiest, capsys):
    """Plans of known models are balanced, with few calls and little traffic."""
    report = _report(capsys, *flags.split())
    assert len(report["matrices"]) == num_matrices
    assert len(report["ranks"]) == num_ranks
    assert report["busiest_over_ideal"] < max_busiest
    # Nothing can be moved more often than there and back to every copy.
    copies = 8 if "no_shard" in flags else 2 if flags.endswith("--hsdp 2") else 1
    assert (
        0
        < sum(rank["bytes_sent"] for rank in report["ranks"])
        <= 2 * report["num_elements"] * (1 + copies)
    )
    if LLAMA in flags:
        elements = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
        assert report["num_elements"] == 32 * elements
    else:
        # Most experts lie whole on a rank, and stay there: 3 % would travel if all did.
        assert report["moved_fraction"] < 0.11
        # One call for each matrix would be 113 on one rank.
        assert max(rank["num_calls"] for rank in report["ranks"]) <= 14


WITHOUT_TORCH = """
import sys
from megatron_muon.tools.plan.command import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


def test_plan_imports_no_torch():
    """The command plans a model of Megatron without torch."""
    done = run_command(sys.executable, "-c", WITHOUT_TORCH, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "exchange: 4 matrices, 1 of them split; a GPU sends 17 MB" in done.stdout


def test_limit_that_is_kept_is_not_refused(capsys):
    """A limit that the plans of one arena keep together is accepted."""
    arguments = (
        "--preset qwen3-30b-a3b --num-layers 4 --dp 8 --ep 4 --muon-fsdp-staging-bytes".split()
    )
    with pytest.raises(SystemExit):
        main([*arguments, "1"])
    refusal = capsys.readouterr().err
    enough = int(re.search(r"Set --muon-fsdp-staging-bytes to (\d+) or more", refusal)[1])
    needed = _staging_bytes(_report(capsys, *arguments, str(enough)))
    assert needed <= enough
    assert _staging_bytes(_report(capsys, *arguments, str(needed))) <= needed
    plans = simulate(
        dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=4),
        Parallelism(dp=8, ep=4),
        PlanSettings(staging_bytes=needed),
        Splits(),
    )
    assert needed < 2 * max(plan.staging_bytes for plan in plans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--dp 8",
            "num_layers: expected a positive number, got 0. Pass --num-layers, or --preset or",
        ),
        ("--preset llama3-8b --num-layers 0", "num_layers: expected a positive number, got 0."),
        (f"{LLAMA} --ep 2", "ep: expected a divisor of 0 experts, got 2"),
        (f"{LLAMA} --dp 9 --hsdp 2", "hsdp: expected dp to be a multiple of 2 instances, got dp 9"),
        (f"{LLAMA} --tp 3", "to be a multiple of 3 tensor-parallel ranks"),
        (f"{LLAMA} --muon-fsdp-cost-model tflops=0", "expected a positive, finite tflops, got 0.0"),
        (f"{LLAMA} --num-layers 1 --svg /nowhere/step.svg", "No such file or directory: '/nowhere"),
        (f"{LLAMA} --soap --json", "--soap: expected neither --json nor --svg with it."),
        (f"{LLAMA} --muon-fsdp-max-owners 3", "max-owners: expected a power of two"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message, capsys):
    """Refused arguments end with exit code 2, and say what is expected and what to do."""
    with pytest.raises(SystemExit) as error:
        main(arguments.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err
