# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and what they count is right; how fast anything is, they say, not a test."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from helpers.ranks import ROOT, launch
from training_log import TrainingLog


@pytest.mark.ranks
def test_optimizer_step_measures_every_peer_and_writes_json(tmp_path):
    """One run, all peers; owner moves fewer bytes than gathering everything to everyone."""
    path = tmp_path / "step.json"
    flags = ["--hidden", "32", "--layers", "2", "--rounds", "2", "--json", str(path)]
    run = launch(2, flags, script=ROOT / "benchmarks" / "optimizer_step.py").check()
    data = json.loads(path.read_text())
    peers = data["peers"]
    assert set(peers) | set(data["skipped"]) == {
        "adam", "owner", "owner, wire fp32", "all_gather", "layer_wise", "torch.optim.Muon",
    }  # fmt: skip
    assert peers["adam"]["bytes_a_rank"] == 0
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


@pytest.mark.slow
@pytest.mark.ranks
def test_checkpoint_measures_muon_beside_adam(tmp_path, monkeypatch, capsys):
    """Muon keeps one state where Adam keeps two, so its checkpoint is smaller."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = spec_from_file_location("checkpoint_benchmark", ROOT / "benchmarks" / "checkpoint.py")
    benchmark = module_from_spec(spec)
    spec.loader.exec_module(benchmark)
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
